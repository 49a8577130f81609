"""Tiny models of the real transformers classes, written once a process, with weights that make text worth scoring."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from npu_vlrl.config import ModelConfig
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.tiny import tiny_tokenizer, write_tiny_model
from tests.support.tokenizers import qwen_tokenizer, template

_folders = tempfile.TemporaryDirectory(prefix="tiny-models-")

VISION_KINDS = ("qwen2_5_vl", "qwen3_vl")
KINDS = (*VISION_KINDS, "qwen3")
PUBLISHED_ROWS = 151936
"""Rows of the embedding of published models; the vocabulary has 151669 tokens, the others are padding."""


def is_vision(kind: str) -> bool:
    return FAMILIES[kind].vision is not None


@cache
def tiny_folder(kind: str, hidden: int = 64) -> Path:
    """A folder of about 400 tokens, whose next-token distributions differ clearly from a flat one."""
    folder = write_tiny_model(kind, Path(_folders.name) / f"{kind}-{hidden}", seed=0, hidden=hidden)
    model = plain_model(folder)
    _randomise(model, std=0.08)
    family = FAMILIES[kind]
    end = tiny_tokenizer(family).convert_tokens_to_ids(family.chat.end_of_turn[0])
    _make_ends_likely(model, model.get_submodule(family.text), end, below=2)
    model.save_pretrained(folder)
    return folder


@cache
def qwen_folder(kind: str, template_name: str | None = None) -> Path:
    """A folder with the real Qwen vocabulary and a published chat template, and a head of its own (not tied)."""
    tokenizer = qwen_tokenizer()
    name = template_name or kind
    folder = Path(_folders.name) / f"qwen-{kind}-{name}"
    write_tiny_model(kind, folder, seed=0, hidden=32)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
        for key in ("image", "video", "vision_start", "vision_end"):
            if hasattr(part, f"{key}_token_id"):
                word = f"<|{key}{'_pad' if key in ('image', 'video') else ''}|>"
                setattr(part, f"{key}_token_id", tokenizer.convert_tokens_to_ids(word))
    config.get_text_config().vocab_size = PUBLISHED_ROWS
    with torch.random.fork_rng():
        torch.manual_seed(1)
        family = AutoModelForImageTextToText if is_vision(kind) else AutoModelForCausalLM
        model = family.from_config(config)
    _randomise(model, std=0.12)
    for end in ("<|im_end|>", *(["</think>"] if "think" in name else [])):
        text = model.get_submodule(FAMILIES[kind].text)
        _make_ends_likely(model, text, tokenizer.convert_tokens_to_ids(end), below=4.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template(name))
    return folder


def load(folder: Path, **settings: Any) -> LoadedModel:
    """A fresh copy, as a run loads it; tests may change its weights."""
    return load_model(ModelConfig(path=str(folder), **settings), folder, 0, torch.device("cpu"))


@cache
def loaded(folder: Path) -> LoadedModel:
    """Shared by tests that do not change it."""
    return load(folder)


def plain_model(folder: Path) -> Any:
    """The untouched transformers model of a folder."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    family = AutoModelForImageTextToText if is_vision(kind) else AutoModelForCausalLM
    return family.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@cache
def plain(folder: Path) -> Any:
    """Shared by tests that do not change it."""
    return plain_model(folder)


def plain_patches(folder: Path, images: list[Any]) -> Any:
    """What the model takes for uint8 images, by the image processor of transformers."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    facts = FAMILIES[kind].vision
    assert facts is not None
    processor = getattr(transformers, f"{settings['image_processor_type']}Pil")(**settings)
    made = processor(images=images, return_tensors="pt", **facts.image_options)
    made.pop("num_patches", None)
    return made


@torch.no_grad()
def _randomise(model: nn.Module, std: float) -> None:
    """Every weight, biases and norms included: a default of one or zero would hide that it is left out."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)


@torch.no_grad()
def _make_ends_likely(model: Any, text: Any, end: Any, below: float) -> None:
    """Turns the head's row of `end` towards the mean hidden state, so that turns end by themselves now and then.

    `below`: nats between its mean logit and the logarithm of what all tokens weigh together.
    """
    ids = torch.randint(0, 200, (8, 24), generator=torch.Generator().manual_seed(3))
    hidden = text(input_ids=ids).last_hidden_state[:, 4:].flatten(0, 1)
    mean = hidden.mean(0)
    others = (hidden @ model.lm_head.weight.T).logsumexp(1).mean()
    model.lm_head.weight[end] = mean * (others - below) / mean.square().sum()
