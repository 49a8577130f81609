"""Qwen2-VL: every block of its tower sees the whole image, and it writes positions from 0 to 1000."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.model.families.base import TowerShape, VisionFacts
from npu_vlrl.model.families.qwen import QwenVision
from npu_vlrl.model.families.tiny import CLIP, images_of


class Qwen2VL(QwenVision):
    title = "Qwen2-VL"
    model_type = "qwen2_vl"
    model_class = "Qwen2VLForConditionalGeneration"
    vision = VisionFacts(
        gated=False,
        fast_images=True,
        position_scale=1000,  # arXiv 2409.12191, section 2.2
        width_key="hidden_size",
    )
    vllm = False
    megatron = False

    def tower_shape(self, settings: Any) -> TowerShape:
        width, merge = settings.embed_dim, settings.spatial_merge_size  # `hidden_size` is that of the language model
        inner = int(width * settings.mlp_ratio)
        return TowerShape(width, settings.num_heads, inner, settings.depth, merge, smallest=(1, merge, merge))

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        half = hidden // 4 // 2
        spatial = half * 3 // 8
        rope = {"rope_theta": 1e6, "mrope_section": [half - 2 * spatial, spatial, spatial]}
        vision = {
            "depth": 2,
            "embed_dim": hidden,
            "hidden_size": hidden,
            "mlp_ratio": 2,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }
        return {
            "text_config": self.tiny_text(ids, rows, hidden, layers, rope),
            "vision_config": vision,
            "tie_word_embeddings": True,
            **self.tiny_ids(ids),
        }

    def tiny_images(self) -> dict[str, Any]:
        return images_of("Qwen2VLImageProcessor", 28, CLIP)


FAMILY = Qwen2VL()
