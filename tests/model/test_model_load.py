"""Folders: what loads, what is refused and with which words, and where adapters go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from npu_vlrl.config import ConfigError, LoraConfig, ModelConfig
from npu_vlrl.model.load import load_model, load_weights, model_folder, replace_weights
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.types import DataError, Message
from npu_vlrl.workflow.render import Renderer
from tests.support.episodes import Stage, an_image, task
from tests.support.models import KINDS, VISION_KINDS, is_vision, load, plain, tiny_folder

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("qwen2_5_vl"), tmp_path / "model"))


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    weights = change(weights) or weights
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# What loads


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_folder_is_an_ordinary_folder(kind: str) -> None:
    """Plain transformers reads it, and our copy holds the same weights."""
    model, tokenizer = plain(tiny_folder(kind)), AutoTokenizer.from_pretrained(tiny_folder(kind))
    ours = load(tiny_folder(kind))
    assert type(ours.policy.base) is type(model)
    expected = model.state_dict()
    found = ours.policy.base.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    text = "<|im_start|>user\nWhich way? <tool_call>{}</tool_call><|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == ours.tokenizer.encode(text)
    assert ours.policy.n_tokens == len(tokenizer) <= len(ours.policy.head_weight) < len(tokenizer) + 64
    assert (ours.processor is not None) is is_vision(kind)
    names = ("<|im_end|>", "<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    special = ours.policy.special
    found_ids = [*special.end_of_turn, special.image, special.video, special.vision_start, special.vision_end]
    assert found_ids == (ids if is_vision(kind) else [*ids[:2], None, None, None, None])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_depends_on_its_seed(kind: str, tmp_path: Path) -> None:
    folders = [write_tiny_model(kind, tmp_path / str(i), seed, hidden=32, layers=1) for i, seed in enumerate((3, 3, 4))]
    first, same, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_every_process_of_a_training_may_write_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on a machine of its own does; transformers by itself writes on rank 0 only."""
    alone = write_tiny_model("qwen2_5_vl", tmp_path / "alone", 3, hidden=32, layers=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    second = write_tiny_model("qwen2_5_vl", tmp_path / "second", 3, hidden=32, layers=1)
    assert sorted(p.name for p in second.iterdir()) == sorted(p.name for p in alone.iterdir())


def test_tiny_paths(tmp_path: Path) -> None:
    made = model_folder("tiny:qwen3", tmp_path / "model", seed=0)
    assert made == tmp_path / "model" / "qwen3-seed0"
    (made / "mark").touch()
    again = model_folder("tiny:qwen3", tmp_path / "model", seed=0)
    assert again == made and (made / "mark").exists()  # a resumed run keeps its model
    # a folder that is left over from another seed, or from a start that was killed, is not taken for this one
    (tmp_path / "model" / ".qwen3-seed1.partial").mkdir()
    other = model_folder("tiny:qwen3", tmp_path / "model", seed=1)
    assert other != made and not torch.equal(
        *(next(iter(load_file(f / "model.safetensors").values())) for f in (made, other))
    )
    assert not (tmp_path / "model" / ".qwen3-seed1.partial").exists()
    with pytest.raises(
        ConfigError, match="model.path: unknown tiny model 'qwen4'; choose one of glm4v, internvl, qwen2"
    ):
        model_folder("tiny:qwen4", tmp_path / "other", seed=0)
    assert model_folder(str(made), tmp_path / "scratch", seed=0) == made


OLD_NAMES = {
    "qwen2_5_vl": [("model.language_model.", "model."), ("model.visual.", "visual.")],
    "qwen3_vl": [],
    "qwen3": [],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_written", [True, False])
def test_checkpoints_under_older_and_newer_key_names(kind: str, head_written: bool, tmp_path: Path) -> None:
    """Published Qwen2.5-VL has `visual.*` and `model.layers.*`; a state dict of today has other names. Tied heads may
    be written or not.
    """
    model = plain(tiny_folder(kind))
    for label, names in (("new", []), ("old", OLD_NAMES[kind])):
        target = Path(shutil.copytree(tiny_folder(kind), tmp_path / label))
        weights = {}
        for key, value in model.state_dict().items():
            for new, old in names:
                key = key.replace(new, old)
            if head_written or key != "lm_head.weight":
                weights[key] = value.clone()
        if names:
            assert {"visual.merger.mlp.0.weight", "model.layers.0.mlp.up_proj.weight"} <= weights.keys()
        save_file(weights, target / "model.safetensors", {"format": "pt"})
        found = load_weights(target, torch.float32).state_dict()
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_types_of_weights_and_pixel_limits() -> None:
    model = load(tiny_folder("qwen3_vl"), dtype="bfloat16", max_pixels=64 * 64)
    assert {p.dtype for p in model.policy.model.parameters()} == {torch.bfloat16}
    assert model.processor is not None
    assert model.processor.describe(an_image(100, 100, 0)).n_tokens == 4
    assert load(tiny_folder("qwen3_vl")).processor.describe(an_image(100, 100, 0)).n_tokens == 9  # type: ignore[union-attr]


def test_a_template_in_the_processors_file(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load(folder).tokenizer.chat_template == template


def test_a_text_model_ignores_an_image_processor(tmp_path: Path) -> None:
    target = Path(shutil.copytree(tiny_folder("qwen3"), tmp_path / "model"))
    shutil.copy(tiny_folder("qwen2_5_vl") / "preprocessor_config.json", target)
    assert load(target).processor is None


def test_weights_are_replaced_in_place(folder: Path) -> None:
    model = load(folder)
    pointers = [p.data_ptr() for p in model.policy.model.parameters()]
    with torch.no_grad():
        for parameter in model.policy.model.parameters():
            parameter.zero_()
    replace_weights(model.policy, folder)
    expected = plain(tiny_folder("qwen2_5_vl")).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.policy.base.state_dict().items())
    assert [p.data_ptr() for p in model.policy.model.parameters()] == pointers


# What is refused


def merger(weights: dict[str, torch.Tensor]) -> str:
    """Its name in the file, which 5.5 begins with `model.`."""
    (name,) = (name for name in weights if name.endswith("visual.merger.mlp.2.weight"))
    return name


def drop_key(weights: dict[str, torch.Tensor]) -> None:
    del weights[merger(weights)]


def add_key(weights: dict[str, torch.Tensor]) -> None:
    weights["extra.weight"] = torch.zeros(1)


def reshape_key(weights: dict[str, torch.Tensor]) -> None:
    weights[merger(weights)] = torch.zeros(3, 3)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])


def without_tokens(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: change_weights(f, drop_key), r"do not fit.*: 1 missing \(model.visual.merger.mlp.2.weight\); download"),
    (lambda f: change_weights(f, add_key), r"do not fit.*: 1 left over \(extra.weight\)"),
    (
        lambda f: change_weights(f, reshape_key),
        r"do not fit.*: 1 of another shape \(.*merger.mlp.2.weight \[3, 3\] instead of \[64, 256\]\)",
    ),
    (lambda f: (f / "model.safetensors").unlink(), r"no weights: neither model.safetensors nor .*; download them"),
    (pickled, r"no model.safetensors: its weights are pickles .*save_pretrained"),
    (truncated, r"model.safetensors is cut short.*download it again"),
    (lambda f: (f / "config.json").write_text("{"), r"config.json.*not a valid JSON"),
    (lambda f: (f / "config.json").write_text("{}"), r"config.json.*model_type"),
    (
        lambda f: change_json(f / "config.json", model_type="unheard_of"),
        r"is of the model type unheard_of; supported are glm4v, internvl, qwen2",
    ),
    (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        r"is of the model type llama; supported are glm4v, internvl, qwen2",
    ),
    (lambda f: (f / "config.json").unlink(), r"not a Hugging Face model folder"),
    (lambda f: (f / "chat_template.jinja").unlink(), r"no chat template; a base model has none.*add the publisher"),
    (lambda f: (f / "preprocessor_config.json").unlink(), r"no preprocessor_config.json; add"),
    (
        lambda f: change_json(f / "preprocessor_config.json", image_processor_type="Other"),
        r"preprocessor_config.json.*Other",
    ),
    (without_tokens, r"no tokenizer.json; download it"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_folder_is_refused_by_name(number: int, folder: Path) -> None:
    spoil, message = BROKEN[number]
    load(folder)
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder)
    assert str(caught.value).startswith("model.path") and str(folder) in str(caught.value)


def test_broken_template_files_are_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    for text, message in (("{", "chat_template.json is not a valid JSON file"), ("{}", "has no chat template")):
        (folder / "chat_template.json").write_text(text)
        with pytest.raises(ConfigError, match=f"model.path: .*{message}"):
            load(folder)


def test_pixel_limits_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="model.min_pixels and model.max_pixels.*100000 is above max_pixels 5000"):
        load(tiny_folder("qwen2_5_vl"), min_pixels=100_000, max_pixels=5000)


def test_a_path_that_is_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.path: {tmp_path / 'x'} is not a Hugging Face model folder"):
        load_model(ModelConfig(path=str(tmp_path / "x")), tmp_path, 0, CPU)


def test_a_text_only_model_refuses_images() -> None:
    model = load(tiny_folder("qwen3"))
    renderer = Renderer(model.tokenizer, model.processor, template_name="tiny")
    with pytest.raises(DataError, match="text-only model, but the messages hold 1 images: choose a vision-language"):
        renderer.open([Message("user", (an_image(28, 28, 0), "x"))])
    played = Stage(model).play([task("seen", [an_image(28, 28, 0), "x"]), task("fine", ["x"])], members=1)
    assert played[0].error is not None and played[0].error.startswith("seen: ") and "text-only" in played[0].error
    assert played[1].error is None


# Freezing and adapters


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_a_frozen_tower(kind: str) -> None:
    free, frozen = load(tiny_folder(kind)).policy, load(tiny_folder(kind), freeze_vision=True).policy
    assert frozen.vision_is_frozen and not free.vision_is_frozen
    left_out = free.trainable().keys() - frozen.trainable().keys()
    assert left_out == {name for name in free.trainable() if ".visual." in name}
    assert not frozen.trainable().keys() - free.trainable().keys()


def test_a_text_model_has_nothing_to_freeze() -> None:
    policy = load(tiny_folder("qwen3"), freeze_vision=True).policy
    assert policy.vision is None and policy.vision_is_frozen
    assert all(p.requires_grad for p in policy.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_on_every_named_layer_of_the_language_model_only(kind: str) -> None:
    targets = ("q_proj", "o_proj", "down_proj")
    policy = load(tiny_folder(kind), lora=LoraConfig(rank=2, targets=targets)).policy
    adapted = {name.split(".lora_")[0] for name in policy.trainable()}
    assert all(".lora_" in name for name in policy.trainable())
    expected = {
        name
        for name, module in policy.model.named_modules()
        if name.rpartition(".")[2] in targets and "visual" not in name
    }
    assert adapted == expected
    assert len(adapted) == 2 * len(targets)
    assert policy.vision_is_frozen and policy.has_adapter
    assert not load(tiny_folder(kind)).policy.has_adapter


def test_towers_share_layer_names_with_the_language_model_and_stay_plain() -> None:
    """Qwen2.5-VL's tower has gate_proj, up_proj and down_proj of its own, which suffix matching would adapt."""
    policy = load(tiny_folder("qwen2_5_vl"), lora=LoraConfig(rank=2)).policy
    assert policy.vision is not None
    assert any("down_proj" in name for name, _ in policy.vision.roots[0].named_modules())
    assert not any("lora" in name for name, _ in policy.vision.roots[0].named_modules())


@pytest.mark.parametrize("target", ["q_porj", "qkv", "lm_head", "embed_tokens", "mlp", "self_attn", "norm"])
def test_adapter_targets_that_match_nothing(target: str) -> None:
    lora = LoraConfig(rank=2, targets=("q_proj", target))
    with pytest.raises(ConfigError, match=f"model.lora.targets: no language-model layer is named {target}"):
        load(tiny_folder("qwen3_vl"), lora=lora)


def test_gradient_checkpointing_is_switched_on() -> None:
    for wanted in (True, False):
        policy = load(tiny_folder("qwen3"), gradient_checkpointing=wanted).policy
        assert policy.base.is_gradient_checkpointing is wanted
