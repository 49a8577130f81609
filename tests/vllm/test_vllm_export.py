"""An export in plain transformers, with its `AutoProcessor`, and in the real vLLM: the same log-probabilities."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoProcessor, AutoTokenizer

from npu_vlrl.config import LoraConfig
from npu_vlrl.engines.vllm.engine import import_vllm
from npu_vlrl.model.folder import export_model
from tests.support.models import KINDS, is_vision, load, plain_model, tiny_folder

HIDDEN = 128  # heads of 32: vLLM's attention on a CPU knows none of 16
TOLERANCE = 2e-5
LIMIT = 4 * 32 * 32
"""Pixels of an image, below what the folder of the model allows: the run's own setting."""


@pytest.fixture(scope="module", params=KINDS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What an export of trained adapters wrote, and the folder that the training began with."""
    base, kind = tiny_folder(request.param, HIDDEN), request.param
    limits = {"max_pixels": LIMIT} if is_vision(kind) else {}
    loaded = load(base, lora=LoraConfig(rank=4, alpha=8.0), **limits)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.policy.trainable().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    out = tmp_path_factory.mktemp("export") / kind
    export_model(loaded, out)
    return out, base


def prompt(folder: Path, sees: bool) -> tuple[dict[str, Any], Any, str]:
    """Inputs of transformers; the image; and the text, with one placeholder for it."""
    pixels = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    if not sees:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": "Which way is up?"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return dict(tokenizer(text, return_tensors="pt")), None, text
    processor: Any = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": "Which way is up?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    image = Pillow.fromarray(pixels)
    return dict(processor(text=[text], images=[image], return_tensors="pt")), image, text


@torch.no_grad()
def plain_logprobs(folder: Path, inputs: dict[str, Any]) -> torch.Tensor:
    ids = inputs["input_ids"]
    logits = plain_model(folder)(**inputs).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def test_vllm_says_what_plain_transformers_says(exported: tuple[Path, Path]) -> None:
    out, base = exported
    sees = is_vision(out.name)
    inputs, image, text = prompt(out, sees)
    if sees:
        patches = inputs["image_grid_thw"].prod().item()
        unit = 14 if out.name == "qwen2_5_vl" else 16
        assert 0 < patches * unit**2 <= LIMIT < 96 * 128
    expected = plain_logprobs(out, inputs)
    assert (plain_logprobs(base, inputs) - expected).abs().max() > 1e-2

    vllm = import_vllm()
    llm = vllm.LLM(str(out), dtype="float32", max_model_len=512, kv_cache_memory_bytes=2**28, enforce_eager=True)
    try:
        request: Any = {"prompt": text, **({"multi_modal_data": {"image": image}} if sees else {})}
        (answer,) = llm.generate(request, vllm.SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    assert answer.prompt_token_ids == inputs["input_ids"][0].tolist()
    said = answer.prompt_logprobs[1:]
    found = torch.tensor([entry[token].logprob for entry, token in zip(said, answer.prompt_token_ids[1:], strict=True)])
    assert (found - expected).abs().max() < TOLERANCE
