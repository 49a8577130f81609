"""Shared settings of the tiny models of several families: sizes, and the settings of image processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHATML_TEMPLATE = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ 'IMAGE' }}
{%- elif part.type == 'text' %}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""A chat template, with `IMAGE` where a family writes an image."""

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def text_settings(end: int, pad: int, rows: int, hidden: int, layers: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a language model with four heads; `end` and `pad` are ids, `rows` those of the embedding."""
    return {
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", **rope},
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }


def vision_settings(hidden: int) -> dict[str, Any]:
    """Settings of a tower of two blocks with four heads."""
    return {
        "depth": 2,
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_heads": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
    }


def images_of(kind: str, side: int, levels: Mapping[str, Any]) -> dict[str, Any]:
    """Content of preprocessor_config.json for a processor that cuts images into up to 64 tokens of `side` pixels."""
    return {
        "image_processor_type": kind,
        "patch_size": side // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": side * side,
        "max_pixels": side * side * 64,
        **levels,
    }
