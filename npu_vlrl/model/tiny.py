"""Tiny models with random weights: real transformers classes, real processor settings, a byte-level BPE of our own.

They are written as ordinary Hugging Face folders, so they are loaded by the same code as a real checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen2Tokenizer

from npu_vlrl.model.families import FAMILIES, Family
from npu_vlrl.model.saving import save_model, save_tokenizer

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

INIT_STD = 0.1
"""Standard deviation of initial weights; with the default of 0.02 a model of this size learns nothing."""


def tiny_tokenizer(family: Family) -> Qwen2Tokenizer:
    """A byte-level BPE with the family's control tokens, trained on a few sentences; about 400 tokens."""
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
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.tiny_special])
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP + ANSWER])
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=bpe,
        unk_token=None,  # type: ignore[arg-type]  # a byte-level BPE knows every byte
        bos_token=None,
        eos_token=family.chat.end_of_turn[0],
        pad_token=family.tiny_special[0],
        extra_special_tokens=list(family.tiny_special[1:]),
    )
    tokenizer.chat_template = family.tiny_template
    return tokenizer


def write_tiny_model(kind: str, folder: Path, seed: int, hidden: int = 64, layers: int = 2) -> Path:
    """Writes a Hugging Face folder with a random model of the model type `kind` and returns it."""
    if kind not in FAMILIES:
        raise ValueError(f"unknown tiny model {kind!r}; choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    tokenizer = tiny_tokenizer(family)
    rows = -(-len(tokenizer) // 64) * 64
    model_class: Any = getattr(transformers, family.model_class)
    settings = model_class.config_class(**family.tiny_config(tokenizer.get_vocab(), rows, hidden, layers))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(settings)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD)
    partial = folder.with_name(f".{folder.name}.partial")  # so that an existing folder is complete
    model.should_save_on_this_rank = lambda is_main_process: True  # any process of a training may write it
    save_model(model, partial)
    save_tokenizer(tokenizer, partial)
    if (images := family.tiny_images()) is not None:
        (partial / "preprocessor_config.json").write_text(json.dumps(images, indent=2))
    return partial.rename(folder)
