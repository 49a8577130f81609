"""Shared facts of the Qwen families: their control tokens, and the positions of their vision-language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.model.families.base import Family
from npu_vlrl.model.families.tiny import CHATML_TEMPLATE, text_settings

END, PAD = "<|im_end|>", "<|endoftext|>"


class Qwen(Family):
    """Base of the Qwen families; text-only by default."""

    vllm = True
    megatron = True
    tiny_special = (
        PAD,
        "<|im_start|>",
        END,
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    tiny_template = CHATML_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")

    def tiny_text(
        self, ids: Mapping[str, int], rows: int, hidden: int, layers: int, rope: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Settings of the language model."""
        return text_settings(ids[END], ids[PAD], rows, hidden, layers, rope)


class QwenVision(Qwen):
    """Base of the Qwen families with a vision tower."""

    text = "model.language_model"
    published = (("visual.", "model.visual."), ("model.", "model.language_model."))
