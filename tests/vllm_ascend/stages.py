"""Models with vllm-ascend's engine, on the first device of the stand-in."""

from __future__ import annotations

from typing import Any

import torch

from npu_vlrl.config import ModelConfig
from npu_vlrl.model.load import load_model
from tests.host_cann import ROOMY_MIB
from tests.support.models import is_vision, tiny_folder
from tests.support.vllm_stage import HIDDEN, VllmStage

MAX_PIXELS = 224 * 224
"""More than any picture of these tests has. vLLM begins with the largest one that there may be."""

FITS = 0.15
"""In nats. bfloat16 itself moves these models by 0.03 from float32, and vllm-ascend by 0.04."""

VISIBLE = 0.3
"""A gap that is none of rounding."""


def made_stage(kind: str, sleeps: bool = False, **settings: Any) -> VllmStage:
    folder = tiny_folder(kind, HIDDEN)
    limit = {"max_pixels": MAX_PIXELS} if is_vision(kind) else {}
    config = ModelConfig(path=str(folder), dtype="bfloat16", **limit, **settings)
    loaded = load_model(config, folder, 0, torch.device("npu:0"))
    return VllmStage(kind, loaded, ROOMY_MIB * 2**20, sleeps)
