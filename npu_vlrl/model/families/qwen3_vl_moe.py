"""Qwen3-VL-MoE: Qwen3-VL whose layers have experts, of which a router chooses some for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.model.families.base import MixtureFacts
from npu_vlrl.model.families.qwen3_vl import Qwen3VL


class Qwen3VLMoE(Qwen3VL):
    title = "Qwen3-VL-MoE"
    model_type = "qwen3_vl_moe"
    model_class = "Qwen3VLMoeForConditionalGeneration"
    mixture = MixtureFacts()
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj")  # experts are tensors, not layers of their own
    vllm = False
    megatron = False

    def problem(self, settings: Any) -> str | None:
        text = settings.get_text_config()
        if text.hidden_size in (text.moe_intermediate_size, 2 * text.moe_intermediate_size):
            return (
                f"`moe_intermediate_size` is {text.moe_intermediate_size} and `hidden_size` {text.hidden_size}, so "
                "matrices of experts are square, and transformers cannot tell whether a file holds them transposed"
            )
        return None

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        config = super().tiny_config(ids, rows, hidden, layers)
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden * 3 // 4}
        return config | {"text_config": config["text_config"] | experts}


FAMILY = Qwen3VLMoE()
