"""Qwen3, text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.model.families.qwen import Qwen


class Qwen3(Qwen):
    title = "Qwen3"
    model_type = "qwen3"
    model_class = "Qwen3ForCausalLM"

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        settings = self.tiny_text(ids, rows, hidden, layers, {"rope_theta": 1e6})
        return settings | {"head_dim": hidden // 4, "tie_word_embeddings": True}


FAMILY = Qwen3()
