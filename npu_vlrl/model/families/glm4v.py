"""GLM-4.1V: a turn ends by the control token that begins the next one, and often by `</answer>`.

Control tokens, ends of turns and template are those of the published GLM-4.1V-9B-Thinking (its chat_template.jinja, and
`eos_token_id` of its generation_config.json). Its template has no place for tools; their form is that of the template
of GLM-4.5, which the later models of the family share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from npu_vlrl.model.families.base import ChatFormat, Family, TowerShape, VisionFacts
from npu_vlrl.model.families.tiny import CLIP, images_of, text_settings, vision_settings

FRAMES = 2
"""Number of equal frames as which an image is read; limits of its size count the pixels of all frames."""

TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages -%}
{%- if message.role in ('system', 'user', 'assistant') -%}
{{ '<|' + message.role + '|>\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ '<|begin_of_image|><|image|><|end_of_image|>' }}
{%- elif part.type == 'text' %}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}
"""


class Glm4V(Family):
    title = "GLM-4.1V"
    model_type = "glm4v"
    model_class = "Glm4vForConditionalGeneration"
    chat = ChatFormat(
        title="GLM-4.1V",
        end_of_turn=("<|user|>", "<|endoftext|>", "<|observation|>", "</answer>"),
        closing="",
        spoken_ends=frozenset({"</answer>"}),
        image="<|image|>",
        video="<|video|>",
        image_start="<|begin_of_image|>",
        image_end="<|end_of_image|>",
        tool_calls="glm",
    )
    vision = VisionFacts(
        mergers=("model.visual.downsample", "model.visual.merger"),
        position_scale=1000,
        image_processors=("Glm4vImageProcessor",),
        token_ids={
            "image_token_id": "image",
            "video_token_id": "video",
            "image_start_token_id": "image_start",
            "image_end_token_id": "image_end",
        },
    )
    text = "model.language_model"
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    unlike = frozenset({"Glm4vVisionPatchMerger", "apply_rotary_pos_emb"})  # it rotates neighbours, not halves

    def tower_shape(self, settings: Any) -> TowerShape:
        return replace(super().tower_shape(settings), inner=settings.out_hidden_size)

    def image_sizes(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        sizes = super().image_sizes(settings, config)
        smallest, largest = sizes["min_pixels"], sizes["max_pixels"]
        return sizes | {"min_pixels": -(-smallest // FRAMES), "max_pixels": largest // FRAMES}

    def image_limits(self, min_pixels: int, max_pixels: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"size": {"shortest_edge": min_pixels * FRAMES, "longest_edge": max_pixels * FRAMES}}

    # --- a model of random weights ---

    tiny_special = (
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|video|>",
    )
    tiny_template = TEMPLATE

    def tiny_config(self, ids: Mapping[str, int], rows: int, hidden: int, layers: int) -> dict[str, Any]:
        half = hidden // 4 // 4  # of the half of each head that rotates
        spatial = half * 3 // 8
        sections = [half - 2 * spatial, spatial, spatial]
        rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": sections}
        return {
            "text_config": text_settings(ids["<|user|>"], ids["<|endoftext|>"], rows, hidden, layers, rope),
            "vision_config": vision_settings(hidden) | {"patch_size": 14, "image_size": 56},
            "tie_word_embeddings": False,
            **self.tiny_ids(ids),
        }

    def tiny_images(self) -> dict[str, Any]:
        images = images_of("Glm4vImageProcessor", 28, CLIP)
        limits = images.pop("min_pixels"), images.pop("max_pixels")
        return images | self.image_limits(*limits, images)


FAMILY = Glm4V()
