"""Qwen3-VL: features of some blocks of the tower are added behind the first layers of the language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npu_vlrl.model.families.base import TowerShape, VisionFacts
from npu_vlrl.model.families.qwen import QwenVision
from npu_vlrl.model.families.tiny import HALF, images_of, vision_settings

if TYPE_CHECKING:
    from torch import Tensor


class Qwen3VL(QwenVision):
    title = "Qwen3-VL"
    model_type = "qwen3_vl"
    model_class = "Qwen3VLForConditionalGeneration"
    vision = VisionFacts(
        mergers=("model.visual.merger", "model.visual.deepstack_merger_list"),
        gated=False,
        fast_images=True,
        token_side=32,
        position_scale=1000,  # the grounding cookbook of its publisher
    )
    deep_features = "deepstack_features"

    def tower_shape(self, settings: Any) -> TowerShape:
        return replace(super().tower_shape(settings), deep=len(settings.deepstack_visual_indexes))

    def deep_inputs(self, seen_T: Tensor, rows: list[Tensor]) -> dict[str, Any]:
        return {"visual_pos_masks": seen_T[None], "deepstack_visual_embeds": rows}

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        half = hidden // 4 // 2
        spatial = half * 5 // 16
        rope = {
            "rope_theta": 5e6,
            "mrope_section": [half - 2 * spatial, spatial, spatial],
            "mrope_interleaved": True,
        }
        vision = {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
        return {
            "text_config": self.tiny_text(ids, rows, hidden, layers, rope) | {"head_dim": hidden // 4},
            "vision_config": vision_settings(hidden) | vision,
            "tie_word_embeddings": True,
            **self.tiny_ids(ids),
        }

    def tiny_images(self) -> dict[str, Any]:
        return images_of("Qwen2VLImageProcessor", 32, HALF)


FAMILY = Qwen3VL()
