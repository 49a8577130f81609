"""Qwen2.5-VL: most blocks of its tower see windows, and it writes positions in pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from npu_vlrl.model.families.base import TowerShape, VisionFacts
from npu_vlrl.model.families.qwen import QwenVision
from npu_vlrl.model.families.tiny import CLIP, images_of, vision_settings


class Qwen25VL(QwenVision):
    title = "Qwen2.5-VL"
    model_type = "qwen2_5_vl"
    model_class = "Qwen2_5_VLForConditionalGeneration"
    vision = VisionFacts(fast_images=True)

    def tower_shape(self, settings: Any) -> TowerShape:
        shape = super().tower_shape(settings)
        merge, full = shape.merge, len(settings.fullatt_block_indexes)
        window = settings.window_size // (settings.patch_size * merge) * merge  # whole tokens, as the tower cuts them
        return replace(shape, full=full, window=window)

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        half = hidden // 4 // 2
        spatial = half * 3 // 8
        rope = {"rope_theta": 1e6, "mrope_section": [half - 2 * spatial, spatial, spatial]}
        vision = {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return {
            "text_config": self.tiny_text(ids, rows, hidden, layers, rope),
            "vision_config": vision_settings(hidden) | vision,
            "tie_word_embeddings": True,
            **self.tiny_ids(ids),
        }

    def tiny_images(self) -> dict[str, Any]:
        return images_of("Qwen2VLImageProcessor", 28, CLIP)


FAMILY = Qwen25VL()
