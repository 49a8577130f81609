"""A learner's state goes to disk and back bit by bit; a model goes to disk as any user of transformers expects it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from npu_vlrl.config import ModelConfig
from npu_vlrl.hardware import select
from npu_vlrl.learner.checkpoint import CheckpointError, latest
from npu_vlrl.learner.state import load_learner, save_learner
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.load import LoadedModel, load_model
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.types import Sample
from tests.support.checkpoints import as_of_old, change, seal
from tests.support.learning import (
    CPU,
    SMALL_LORA,
    load,
    make_learner,
    plain_logits,
    plain_model,
    samples_of,
    tiny_folder,
)

torch.set_num_threads(1)

SETTINGS: dict[str, dict[str, Any]] = {"whole": {}, "frozen": {"freeze_vision": True}, "lora": {"lora": SMALL_LORA}}


def write(folder: Path, learner: Learner, step: int = 2, **state: Any) -> Path:
    return save_learner(folder, step, learner, select(), state, keep=2)


def values(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.parameters.items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def learned(metrics: dict[str, float]) -> dict[str, float]:
    """Without those that a clock has a part in."""
    return {name: value for name, value in metrics.items() if not name.startswith("update/")}


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_a_restored_learner_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    loaded = load(**SETTINGS[name])
    samples = samples_of(loaded)
    optim: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 4}
    learner = make_learner(loaded, **optim)
    for _ in range(2):
        learner.step(samples)
    learner.skipped.append("g0/9")
    path = write(tmp_path, learner, tasks={"position": 4})
    drawn = torch.rand(3)  # the first numbers after the checkpoint
    unbroken = learner.step(samples), values(learner)

    torch.manual_seed(12345)
    restored = make_learner(load(**SETTINGS[name]), **optim)
    step, state = load_learner(path, restored, select())
    assert (step, state) == (2, {"tasks": {"position": 4}})
    assert restored.updates == 2 and restored.skipped == ["g0/9"]
    assert torch.equal(torch.rand(3), drawn)
    assert learned(restored.step(samples)) == learned(unbroken[0])
    assert equal(values(restored), unbroken[1])

    forgetful = make_learner(load(**SETTINGS[name]), **optim)
    load_learner(path, forgetful, select())
    forgetful.optimizer.state.clear()
    forgetful.step(samples)
    assert not equal(values(forgetful), unbroken[1])  # the moments matter, so the check above would see their loss


@pytest.mark.parametrize("name", SETTINGS)
def test_only_what_is_trained_is_written(tmp_path: Path, name: str) -> None:
    loaded = load(**SETTINGS[name])
    learner = make_learner(loaded)
    learner.step(samples_of(loaded))
    path = write(tmp_path, learner)
    weights, optimizer = load_file(path / "weights.safetensors"), load_file(path / "optimizer.safetensors")
    assert weights.keys() == {n for n, p in loaded.policy.model.named_parameters() if p.requires_grad}
    assert optimizer.keys() == {f"{kind}.{n}" for kind in ("exp_avg", "exp_avg_sq", "step") for n in weights}
    assert any(".visual." in n for n in weights) is (name == "whole")
    assert all("lora_" in n for n in weights) is (name == "lora")


def test_a_checkpoint_forgets_vision_features(tmp_path: Path) -> None:
    """A resumed run has none either, and features depend in their last bits on what is encoded together."""
    loaded = load(freeze_vision=True)
    learner = make_learner(loaded, {"kl_coef": 0.1})
    for expected in (3, 3, 6):
        learner.step(samples_of(loaded))
        assert learner.vision.encoded == expected
        if learner.updates == 2:
            write(tmp_path, learner)
    trained = make_learner(load(), {"kl_coef": 0.1})  # here the reference has features of its own
    for expected in (3, 3, 6):
        trained.step(samples_of(loaded))
        assert trained._reference_vision.encoded == expected
        if trained.updates == 2:
            write(tmp_path / "trained", trained)


def test_a_learner_that_has_not_stepped(tmp_path: Path) -> None:
    learner = make_learner(load())
    path = write(tmp_path, learner, step=0)
    restored = make_learner(load())
    assert load_learner(path, restored, select()) == (0, {})
    assert not restored.optimizer.state and equal(values(restored), values(learner))


def other_size(folder: Path) -> LoadedModel:
    written = write_tiny_model("qwen2_5_vl", folder / "wider", seed=0, hidden=64)
    return load_model(ModelConfig(path=str(written)), folder, 0, CPU)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, make_learner(load()))
    wider = make_learner(other_size(tmp_path))
    before = values(wider)
    with pytest.raises(CheckpointError, match=r"of another model: .*proj.weight is \[32, 3, .*\], here \[64, 3,"):
        load_learner(path, wider, select())
    assert equal(values(wider), before)
    for settings in (SETTINGS["lora"], SETTINGS["frozen"]):
        with pytest.raises(CheckpointError, match=r"step-00000002 is of another model: \['.*\] … \(\d+ names\)"):
            load_learner(path, make_learner(load(**settings)), select())


def drop(word: str) -> Any:
    return lambda name, tensor: None if name.startswith(word) else tensor


def instead(word: str, new: Callable[[Tensor], Tensor]) -> Any:
    return lambda name, tensor: new(tensor) if name.startswith(word) else tensor


NORM = "model.language_model.layers.0.input_layernorm.weight"

DAMAGE: dict[str, tuple[str, Any, str]] = {
    "no tensor at all": ("optimizer", drop(""), r"the optimiser has no exp_avg\."),
    "one moment is missing": ("optimizer", drop(f"exp_avg_sq.{NORM}"), rf"has no exp_avg_sq\.{NORM} \(1 tensors\)"),
    "all moments of one": ("optimizer", lambda n, t: None if n.endswith(f".{NORM}") else t, r"has no .*\(3 tensors\)"),
    "a count is missing": ("optimizer", drop(f"step.{NORM}"), rf"the optimiser has no step\.{NORM}"),
    "empty": ("optimizer", instead(f"exp_avg.{NORM}", lambda t: t[:0]), rf"exp_avg\.{NORM} is F32 \[0\], not F32 \[32"),
    "one number": ("optimizer", instead(f"exp_avg.{NORM}", lambda t: t[:1].clone()), r"is F32 \[1\], not F32 \[32\]"),
    "a row": ("optimizer", instead("exp_avg", lambda t: t[None].clone()), r"is F32 \[1, .*\], not F32 "),
    "many counts": (
        "optimizer",
        instead("step.", lambda t: torch.full((32,), 2.0)),
        r"step\..* is F32 \[32\], not F32 \[\]",
    ),
    "integers": ("optimizer", instead("exp_avg_sq", lambda t: t.long()), r"exp_avg_sq\..* is I64 \["),
    "half floats": ("weights", lambda n, t: t.half(), r"holds .* as F16, not F32 or BF16"),
    "no random state": ("rng", drop("torch"), r"rng\.safetensors: torch is no random state"),
    "half a random state": ("rng", lambda n, t: t[:100].clone(), r"rng\.safetensors: torch is no random state"),
}


OLD = ("no tensor at all", "one moment is missing", "empty", "one number", "half a random state")
"""Found without checksums and without the list of what was never stepped, too."""


@pytest.mark.parametrize(("name", "old"), [*((name, False) for name in DAMAGE), *((name, True) for name in OLD)])
def test_state_that_does_not_fit_is_refused_by_name(stepped: Path, tmp_path: Path, name: str, old: bool) -> None:
    """Also where the checksums say nothing: they were written anew, or are those of an earlier release."""
    file, new, message = DAMAGE[name]
    path = shutil.copytree(stepped, tmp_path / stepped.name)
    change(path / f"{file}.safetensors", new)
    as_of_old(path) if old else seal(path)
    learner = make_learner(load())
    with pytest.raises(CheckpointError, match=message):
        load_learner(path, learner, select())
    assert not learner.updates and (file == "rng" or not learner.optimizer.state)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one step."""
    loaded = load()
    learner = make_learner(loaded)
    learner.step(samples_of(loaded))
    return write(tmp_path_factory.mktemp("stepped"), learner)


@pytest.mark.parametrize("key", ["updates", "skipped"])
def test_a_state_without_its_values(stepped: Path, tmp_path: Path, key: str) -> None:
    path = shutil.copytree(stepped, tmp_path / stepped.name)
    state = json.loads((path / "state.json").read_text())
    for value in ({}, {key: "x"}):
        (path / "state.json").write_text(json.dumps({k: v for k, v in state.items() if k != key} | value))
        seal(path)
        with pytest.raises(CheckpointError, match=rf"state\.json: {key} is (None|'x'), no (int|list)"):
            load_learner(path, make_learner(load()), select())


def test_one_of_an_earlier_release_is_read(stepped: Path, tmp_path: Path) -> None:
    path = shutil.copytree(stepped, tmp_path / stepped.name)
    as_of_old(path)
    restored, other = make_learner(load()), make_learner(load())
    load_learner(path, restored, select())
    load_learner(stepped, other, select())
    assert equal(values(restored), values(other)) and restored.updates == 1
    assert len(restored.optimizer.state) == len(restored.parameters)


# --- export ----------------------------------------------------------------------------------------------------------


def trained(kind: str, **settings: Any) -> tuple[LoadedModel, list[Sample]]:
    loaded = load(kind, **settings)
    samples = samples_of(loaded, with_images=kind != "qwen3")
    learner = make_learner(loaded, lr=3e-2)
    for _ in range(2):
        learner.step(samples)
    loaded.policy.model.eval()
    return loaded, samples


def live_logits(loaded: LoadedModel, samples: list[Sample]) -> Tensor:
    learner = make_learner(loaded)
    with torch.no_grad():
        hidden = []
        for sample in samples:
            (batch,) = learner._micro_batches([sample])
            features = learner.vision.fixed([batch.images[i] for i in batch.image_order])
            hidden.append(loaded.policy.hidden_packed(batch.token_ids_T, batch.position_ids_3T, batch.tree, features))
        return torch.cat(hidden) @ loaded.policy.head_weight.T


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen2_5_vl", "whole"),
        ("qwen2_5_vl", "lora"),
        ("qwen3_vl", "whole"),
        ("qwen3_vl", "lora"),
        ("qwen3", "whole"),
        ("qwen3", "lora"),
    ],
)
def test_plain_transformers_computes_what_the_live_policy_does(tmp_path: Path, kind: str, name: str) -> None:
    loaded, samples = trained(kind, **SETTINGS[name])
    before = {n: p.detach().clone() for n, p in loaded.policy.model.named_parameters()}
    target = tmp_path / kind
    export_model(loaded, target)
    with torch.no_grad():
        exported = torch.cat(plain_logits(plain_model(target), loaded, samples))
        start = torch.cat(plain_logits(plain_model(tiny_folder(kind)), loaded, samples))
    live = live_logits(loaded, samples)
    assert (exported - live).abs().max() < 1e-5
    assert (start - live).abs().max() > 1e-2  # it was trained
    assert loaded.policy.has_adapter is (name == "lora")  # merging was done on a copy
    assert all(torch.equal(p, before[n]) for n, p in loaded.policy.model.named_parameters())
    assert {p.name for p in tmp_path.iterdir()} == {kind}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3"])
def test_tokenizer_and_processor_are_in_the_folder(tmp_path: Path, kind: str) -> None:
    loaded = load(kind)
    source = shutil.copytree(tiny_folder(kind), tmp_path / "source")
    (source / "video_preprocessor_config.json").write_text('{"size": {"longest_edge": 7}}')
    export_model(replace(loaded, folder=source), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Which way? <|im_end|>\n<answer>up</answer> é"
    assert tokenizer.encode(text) == loaded.tokenizer.encode(text)
    assert tokenizer.chat_template == loaded.tokenizer.chat_template
    assert len(tokenizer) == len(loaded.tokenizer) and tokenizer.eos_token == "<|im_end|>"
    assert (tmp_path / "out" / "video_preprocessor_config.json").read_text() == '{"size": {"longest_edge": 7}}'
    if kind == "qwen3":
        assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    else:
        processor: Any = Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "out")
        assert (processor.patch_size, processor.merge_size) == (14, 2)
        assert load_model(ModelConfig(path=str(tmp_path / "out")), tmp_path, 0, CPU).processor == loaded.processor
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind


def test_an_export_that_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    loaded = load()
    with (
        mock.patch.object(type(loaded.tokenizer), "save_pretrained", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        export_model(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (next(tmp_path.iterdir()) / "left_over.json").write_text("{}")
    for _ in range(2):  # a second export replaces the first
        export_model(loaded, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / "left_over.json").exists()


def test_no_checkpoint_is_looked_for_in_an_export(tmp_path: Path) -> None:
    loaded = load()
    export_model(loaded, tmp_path / "out")
    assert latest(tmp_path) is None
