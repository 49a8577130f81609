"""Qwen2 and Qwen2.5, text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.model.families.qwen import Qwen


class Qwen2(Qwen):
    title = "Qwen2 and Qwen2.5"
    model_type = "qwen2"
    model_class = "Qwen2ForCausalLM"

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        return self.tiny_text(ids, rows, hidden, layers, {"rope_theta": 1e6}) | {"tie_word_embeddings": True}


FAMILY = Qwen2()
