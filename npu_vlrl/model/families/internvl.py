"""InternVL 3 and 3.5, in transformers' layout (their folders end with `-hf`).

An image is cut into tiles of one size, beside a thumbnail. Each tile is the same number of tokens, whose positions are
counted like text. The tower and its projector are separate modules. Control tokens are those of the published folders;
their processor, not their template, writes `<img>` and `</img>` around the placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from npu_vlrl.model.families.base import ChatFormat, Family, Grid, TowerShape, VisionFacts
from npu_vlrl.model.families.tiny import CHATML_TEMPLATE, text_settings

if TYPE_CHECKING:
    from torch import Tensor

MERGE = 2
"""Patches of a token along each side."""
TEXTS = ("qwen2", "qwen3")
"""Model types of the supported language models."""
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


class InternVL(Family):
    title = "InternVL 3 and 3.5"
    model_type = "internvl"
    model_class = "InternVLForConditionalGeneration"
    chat = ChatFormat(
        title="InternVL",
        image="<IMG_CONTEXT>",
        video="<video>",
        image_start="<img>",
        image_end="</img>",
        frames_images=True,
    )
    vision = VisionFacts(
        roots=("model.vision_tower", "model.multi_modal_projector"),
        blocks="model.vision_tower.encoder.layer",
        patches="model.vision_tower.embeddings.patch_embeddings.projection",
        mergers=("model.multi_modal_projector",),
        gated=False,
        position_scale=1000,
        positions="line",
        image_processors=("GotOcr2ImageProcessor",),
        image_options={"crop_to_patches": True},
        tower_keys={},
        width_key=None,
        token_ids={"image_token_id": "image"},
    )
    text = "model.language_model"

    def problem(self, settings: Any) -> str | None:
        kind = settings.get_text_config().model_type
        if kind not in TEXTS:
            return f"its language model is of the type {kind}; supported are {', '.join(TEXTS)}"
        if settings.downsample_ratio != 1 / MERGE:
            return f"`downsample_ratio` is {settings.downsample_ratio}; supported is {1 / MERGE}"
        return None

    def tower_shape(self, settings: Any) -> TowerShape:
        rows, columns = (side // patch for side, patch in zip(settings.image_size, settings.patch_size, strict=True))
        return TowerShape(
            settings.hidden_size,
            settings.num_attention_heads,
            settings.intermediate_size,
            full=settings.num_hidden_layers,
            merge=MERGE,
            class_tokens=1,
            smallest=(1, rows, columns),
        )

    def tower_inputs(self, patches_PD: Tensor, grids_N3: Tensor) -> dict[str, Any]:
        _, rows, columns = grids_N3[0].tolist()
        side = round((patches_PD.shape[1] / 3) ** 0.5)
        tiles = patches_PD.view(-1, rows, columns, 3, side, side).permute(0, 3, 1, 4, 2, 5)
        return {"pixel_values": tiles.reshape(-1, 3, rows * side, columns * side)}

    def image_sizes(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        patch, tile = config["vision_config"]["patch_size"], _tile_pixels(settings)
        return {
            "patch_size": patch if isinstance(patch, int) else patch[0],
            "merge_size": MERGE,
            "temporal_patch_size": 1,
            "min_pixels": settings.get("min_patches", 1) * tile,
            "max_pixels": settings.get("max_patches", 12) * tile,
        }

    def image_limits(self, min_pixels: int, max_pixels: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Options of transformers' processor: limits are numbers of tiles, without the thumbnail."""
        tile = _tile_pixels(settings)
        return {"min_patches": max(1, min_pixels // tile), "max_patches": max(1, max_pixels // tile)}

    def read_pixels(self, output: Mapping[str, Any], patch_size: int) -> tuple[Tensor, Grid]:
        tiles = output["pixel_values"]
        count, _, height, width = tiles.shape
        rows, columns = height // patch_size, width // patch_size
        patches = tiles.view(count, 3, rows, patch_size, columns, patch_size).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(count * rows * columns, -1), (count, rows, columns)

    # --- a model of random weights ---

    tiny_special = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<img>",
        "</img>",
        "<IMG_CONTEXT>",
        "<video>",
    )
    tiny_template = CHATML_TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\\n")

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        text = text_settings(ids["<|im_end|>"], ids["<|endoftext|>"], rows, hidden, layers, {"rope_theta": 1e6})
        vision = {
            "num_hidden_layers": 2,
            "hidden_size": hidden,
            "intermediate_size": hidden * 2,
            "num_attention_heads": 4,
            "image_size": [56, 56],
            "patch_size": [14, 14],
        }
        return {
            "text_config": text | {"model_type": "qwen3", "head_dim": hidden // 4},
            "vision_config": vision,
            "image_seq_length": 4,
            "tie_word_embeddings": True,
            **self.tiny_ids(ids),
        }

    def tiny_images(self) -> dict[str, Any]:
        return {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            **IMAGENET,
        }


def _tile_pixels(settings: Mapping[str, Any]) -> int:
    return int(settings["size"]["height"] * settings["size"]["width"])


FAMILY = InternVL()
