"""The layout of published folders, by hand; what reads it is in tests/transformers4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from npu_vlrl.config import ConfigError, LoraConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.inspect import inspect_folder
from npu_vlrl.model.saving import (
    published_config,
    published_tokenizer,
    save_model,
    save_tokenizer,
    split_processor,
    write_pixel_limits,
)
from npu_vlrl.model.tiny import tiny_tokenizer, write_tiny_model
from tests.support.models import KINDS, is_vision, load, plain_model

MROPE = {"mrope_section": [16, 24, 24], "rope_type": "default"}


def test_a_text_model() -> None:
    config = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "hidden_size": 8}
    assert published_config(config, True) == {
        "hidden_size": 8,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }


def test_scaled_positions_and_a_part_of_the_head() -> None:
    rope = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}
    assert published_config({"rope_parameters": rope}, False) == {
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "tie_word_embeddings": False,
    }
    assert rope["rope_theta"] == 1e6  # what was given stays


@pytest.mark.parametrize("tied", [True, False])
def test_a_vision_model_says_of_its_head_in_both_places(tied: bool) -> None:
    config = {
        "tie_word_embeddings": not tied,
        "text_config": {"rope_parameters": {"rope_theta": 5e6, **MROPE}, "tie_word_embeddings": not tied},
        "vision_config": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "axial"}, "depth": 2},
    }
    assert published_config(config, tied) == {
        "tie_word_embeddings": tied,
        "text_config": {"rope_theta": 5e6, "rope_scaling": MROPE, "tie_word_embeddings": tied},
        "vision_config": {"rope_theta": 1e4, "rope_scaling": None, "depth": 2},
    }


def test_names_of_a_tokenizer() -> None:
    new = {"extra_special_tokens": ["<a>"], "tokenizer_class": "TokenizersBackend", "eos_token": "<a>"}
    old = {"additional_special_tokens": ["<a>"], "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<a>"}
    assert published_tokenizer(new) == published_tokenizer(old) == old
    named = {"extra_special_tokens": {"image_token": "<a>"}, "tokenizer_class": "Qwen2Tokenizer"}
    assert published_tokenizer(named) == named  # transformers 4 knows it, too


def test_a_tokenizer_without_a_class_of_its_own(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(FAMILIES["qwen2_5_vl"])._tokenizer, eos_token="<|im_end|>"
    )
    save_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    text = "Which way? <answer>up</answer><|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == tokenizer.encode(text)


def test_parts_of_a_processor(tmp_path: Path) -> None:
    image = {"image_processor_type": "Qwen2VLImageProcessorPil", "patch_size": 16}
    whole = {"processor_class": "Qwen3VLProcessor", "image_processor": image, "video_processor": {"fps": 2}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14}')  # the other goes before it
    split_processor(tmp_path)
    assert {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()} == {
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": {"fps": 2},
    }


def test_limits_of_images_have_both_names(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    size = {"shortest_edge": 1, "longest_edge": 2}
    file.write_text(json.dumps({"size": size, "image_processor_type": "Qwen2VLImageProcessorPil"}))
    write_pixel_limits(tmp_path, ImageProcessor(min_pixels=784, max_pixels=4096))
    assert json.loads(file.read_text()) == {
        "min_pixels": 784,
        "max_pixels": 4096,
        "size": {"shortest_edge": 784, "longest_edge": 4096},
        "image_processor_type": "Qwen2VLImageProcessor",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_same_settings_from_both_layouts(tmp_path: Path, kind: str) -> None:
    """But for what the new one says of the head: there the text model of a vision model says nothing."""
    first = AutoConfig.from_pretrained(write_tiny_model(kind, tmp_path / "first", seed=0))
    first.save_pretrained(tmp_path / "new layout")
    (tmp_path / "published").mkdir()
    written = json.loads((tmp_path / "new layout" / "config.json").read_text())
    (tmp_path / "published" / "config.json").write_text(json.dumps(published_config(written, True)))
    new, published = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("new layout", "published"))
    for part in (new, published):
        part.get("text_config", part).pop("tie_word_embeddings", None)
        part.pop("_name_or_path", None)
    assert new == published


def test_adapters_of_16_bits_are_rounded_once(tmp_path: Path) -> None:
    """With what they say added in float32: peft would round their product first, which here gives other weights."""
    base = write_tiny_model("qwen3", tmp_path / "base", seed=0)
    loaded = load(base, lora=LoraConfig(rank=4, alpha=8.0), dtype="bfloat16")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.policy.trainable().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    export_model(loaded, tmp_path / "out")
    trained = {name: p.detach().float() for name, p in loaded.policy.trainable().items()}
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    name = "model.layers.1.mlp.up_proj"
    low, high = (
        next(p for n, p in trained.items() if f"layers.1.mlp.up_proj.lora_{part}." in n) for part in ("A", "B")
    )
    weight, delta = before[f"{name}.weight"].bfloat16().float(), 2.0 * (high @ low)  # alpha / rank
    once, twice = (weight + delta).bfloat16(), (weight + delta.bfloat16().float()).bfloat16()
    assert torch.equal(after[f"{name}.weight"], once) and not torch.equal(once, twice)


# --- heads -----------------------------------------------------------------------------------------------------------


def claims(folder: Path) -> list[Any]:
    config = json.loads((folder / "config.json").read_text())
    return [part["tie_word_embeddings"] for part in (config, config.get("text_config")) if part is not None]


def claim(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def own_head(kind: str, folder: Path) -> None:
    """A head of its own under a config that says that it is the embedding."""
    model = plain_model(write_tiny_model(kind, folder, seed=0))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2 + 1)
    for part in (model.config, model.config.get_text_config()):
        part.tie_word_embeddings = False
    save_model(model, folder)
    claim(folder, lambda config: config.update(tie_word_embeddings=True))
    if is_vision(kind):
        claim(folder, lambda config: config["text_config"].update(tie_word_embeddings=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_its_own_under_a_config_that_says_tied(tmp_path: Path, kind: str) -> None:
    own_head(kind, tmp_path / "base")
    loaded = load(tmp_path / "base")
    head, embedding = loaded.policy.head_weight, loaded.policy.base.get_input_embeddings().weight
    assert torch.equal(head, embedding * 2 + 1)
    export_model(loaded, tmp_path / "out")
    assert claims(tmp_path / "out") == [False] * (1 + is_vision(kind))
    again = plain_model(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, head) and torch.equal(again.get_input_embeddings().weight, embedding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_head_that_one_of_two_configs_denies(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(kind, tmp_path / "base", seed=0)
    if is_vision(kind):
        claim(folder, lambda config: config["text_config"].update(tie_word_embeddings=False))
    export_model(load(folder), tmp_path / "out")
    assert claims(tmp_path / "out") == [True] * (1 + is_vision(kind))


def test_heads_are_told_by_their_weights_and_not_by_the_config(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    assert model.config.tie_word_embeddings is False
    save_model(model, tmp_path / "own")
    model.lm_head.weight = model.model.embed_tokens.weight
    save_model(model, tmp_path / "tied")
    assert (claims(tmp_path / "own"), claims(tmp_path / "tied")) == ([False], [True])
    assert torch.equal(plain_model(tmp_path / "tied").lm_head.weight, model.model.embed_tokens.weight)


# --- mixtures of experts ---------------------------------------------------------------------------------------------


def test_experts_are_written_as_published_and_read_back(tmp_path: Path) -> None:
    """Published files of Qwen3-VL-MoE hold [experts, in, out], which transformers 4 computes with as they are."""
    folder = write_tiny_model("qwen3_vl_moe", tmp_path / "model", 0, hidden=64)
    files = load_file(folder / "model.safetensors")
    (inputs, outputs) = (
        files[f"model.language_model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")
    )
    assert inputs.shape == (8, 64, 2 * 48) and outputs.shape == (8, 48, 64)
    model = load(folder).policy.base
    experts = model.model.language_model.layers[0].mlp.experts
    assert torch.equal(experts.gate_up_proj, inputs.transpose(1, 2))
    assert torch.equal(experts.down_proj, outputs.transpose(1, 2))


@pytest.mark.parametrize("inner", [64, 32])
def test_square_experts_are_refused(tmp_path: Path, inner: int) -> None:
    """transformers transposes what does not fit, and these fit either way."""
    folder = write_tiny_model("qwen3_vl_moe", tmp_path / "model", 0, hidden=64)
    settings = json.loads((folder / "config.json").read_bytes())
    settings["text_config"]["moe_intermediate_size"] = inner
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=f"`moe_intermediate_size` is {inner} and `hidden_size` 64"):
        inspect_folder(folder)
