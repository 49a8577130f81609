"""Tiny models with random weights: real transformers classes, real processor settings, a byte-level BPE of our own.

They are written as ordinary Hugging Face folders, so everything that loads them takes the path of a real checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from npu_vlrl.model.saving import save_model, save_tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
ANSWER = ("<answer>", "</answer>")

CORPUS = (
    "You are a helpful assistant. system user assistant tool",
    "Which way is the top of the photo? Which way does the arrow point?",
    '{"name": "look", "arguments": {}} {"name":"look","arguments":{}}',
    *("up", "right", "down", "left"),
    "Image 1 is what you see. Image 1. you have looked already",
    "No. Your answer is not right. Look again, find the mistake and try again.",
)

CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'text' %}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3")
INIT_STD = 0.1
"""The default of 0.02 learns nothing at this size."""


def tiny_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE with Qwen's control tokens, trained on a few sentences; about 400 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS * 8, trainer)
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL + PLACEHOLDERS])
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP + ANSWER])
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=bpe,
        unk_token=None,  # type: ignore[arg-type]  # a byte-level BPE knows every byte
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(CONTROL[1:] + PLACEHOLDERS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_tiny_model(kind: str, folder: Path, seed: int, hidden: int = 64, layers: int = 2) -> Path:
    """Writes a Hugging Face folder with a random model of `kind` (one of `KINDS`) and returns it."""
    if kind not in KINDS:
        raise ValueError(f"unknown tiny model {kind!r}; choose one of {', '.join(KINDS)}")
    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "qwen3": _qwen3}[kind](
            tokenizer, hidden, layers
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD)
    partial = folder.with_name(f".{folder.name}.partial")  # a folder that is there is whole
    model.should_save_on_this_rank = lambda is_main_process: True  # not on the first of a training's processes alone
    save_model(model, partial)
    save_tokenizer(tokenizer, partial)
    if kind != "qwen3":
        (partial / "preprocessor_config.json").write_text(json.dumps(_preprocessor(kind), indent=2))
    return partial.rename(folder)


def _text_settings(tokenizer: Qwen2Tokenizer, hidden: int, layers: int, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", **rope},
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }


def _token_settings(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _vision_settings(hidden: int) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_heads": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
    }


def _qwen2_5_vl(tokenizer: Qwen2Tokenizer, hidden: int, layers: int) -> nn.Module:
    half = hidden // 4 // 2
    spatial = half * 3 // 8
    rope = {"rope_theta": 1e6, "mrope_section": [half - 2 * spatial, spatial, spatial]}
    vision = {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    config = Qwen2_5_VLConfig(
        text_config=_text_settings(tokenizer, hidden, layers, rope),
        vision_config=_vision_settings(hidden) | vision,
        tie_word_embeddings=True,
        **_token_settings(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(tokenizer: Qwen2Tokenizer, hidden: int, layers: int) -> nn.Module:
    half = hidden // 4 // 2
    spatial = half * 5 // 16
    rope = {
        "rope_theta": 5e6,
        "mrope_section": [half - 2 * spatial, spatial, spatial],
        "mrope_interleaved": True,
    }
    vision = {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config=_text_settings(tokenizer, hidden, layers, rope) | {"head_dim": hidden // 4},
        vision_config=_vision_settings(hidden) | vision,
        tie_word_embeddings=True,
        **_token_settings(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config)


def _qwen3(tokenizer: Qwen2Tokenizer, hidden: int, layers: int) -> nn.Module:
    settings = _text_settings(tokenizer, hidden, layers, {"rope_theta": 1e6})
    return Qwen3ForCausalLM(Qwen3Config(**settings, head_dim=hidden // 4, tie_word_embeddings=True))


def _preprocessor(kind: str) -> dict[str, Any]:
    clip = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    unit = 28 if kind == "qwen2_5_vl" else 32
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": unit // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": unit * unit,
        "max_pixels": unit * unit * 64,
        **(clip if kind == "qwen2_5_vl" else half),
    }
