"""A learner of a model in bfloat16: it learns what one in float32 does, and goes on from a checkpoint bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from npu_vlrl.config import AlgorithmConfig, CriticConfig, OptimConfig
from npu_vlrl.hardware import select
from npu_vlrl.learner.optimizer import master, stepped
from npu_vlrl.learner.state import load_learner, save_learner
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.workflow.export import export
from tests.support.checkpoints import as_of_old, change
from tests.support.learning import SMALL_LORA, an_image, assign_advantages, load, make_learner, samples_of, trajectory

torch.set_num_threads(1)

SETTINGS: dict[str, dict[str, Any]] = {"whole": {}, "frozen": {"freeze_vision": True}, "lora": {"lora": SMALL_LORA}}
DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"


def narrow(**settings: Any) -> LoadedModel:
    return load(dtype="bfloat16", **settings)


def rounded(**settings: Any) -> LoadedModel:
    """A model in float32 that holds the weights of `narrow`."""
    loaded = load(**settings)
    with torch.no_grad():
        for parameter in loaded.policy.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return loaded


def masters(learner: Learner) -> dict[str, Tensor]:
    return {name: master(p).detach().clone() for name, p in learner.parameters.items()}


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.parameters.items()}


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor.grad for tensor in stepped(optimizer) if tensor.grad is not None]


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def learned(metrics: dict[str, float]) -> dict[str, float]:
    """Without those that a clock has a part in."""
    return {name: value for name, value in metrics.items() if not name.startswith("update/")}


# --- it learns -------------------------------------------------------------------------------------------------------


def moved(after: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
    return torch.cat([(after[name].double() - before[name].double()).flatten() for name in before])


def cosine(first: Tensor, second: Tensor) -> float:
    return float(first @ second / first.norm() / second.norm())


def without_masters(learner: Learner, lr: float) -> None:
    """The optimiser steps the weights themselves, as it did before there were masters."""
    for parameter in learner.parameters.values():
        del vars(parameter)["master"]
        assert parameter._post_accumulate_grad_hooks
        parameter._post_accumulate_grad_hooks.clear()
    learner.optimizer = torch.optim.AdamW(learner.parameters.values(), lr=lr, weight_decay=0.0, fused=True)


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
@pytest.mark.parametrize("budget", [10_000, 50])
def test_masters_move_as_the_weights_of_a_float32_run_do(lr: float, budget: int) -> None:
    """Without masters few weights move at all, and no more after six steps than after one."""
    found = {}
    for name, make in (("float32", rounded), ("bfloat16", narrow), ("old", narrow)):
        loaded = make()
        samples = samples_of(loaded)
        learner = make_learner(loaded, {"loss": "reinforce"}, lr=lr, micro_batch_tokens=budget)
        if name == "old":
            without_masters(learner, lr)
        start, places = weights(learner), [p.data_ptr() for p in learner.parameters.values()]
        learner.step(samples)
        first = moved(masters(learner), start)
        for _ in range(5):
            learner.step(samples)
        found[name] = moved(masters(learner), start)
        assert [p.data_ptr() for p in learner.parameters.values()] == places
        if name == "bfloat16":
            assert equal(weights(learner), {n: m.bfloat16() for n, m in masters(learner).items()})
            seen = moved(weights(learner), start)
        if name == "old":
            assert int((first != 0).sum()) == pytest.approx(int((found[name] != 0).sum()), rel=0.05)
    assert cosine(found["bfloat16"], found["float32"]) > 0.99
    assert float(found["bfloat16"].norm() / found["float32"].norm()) == pytest.approx(1.0, abs=0.02)
    assert float((found["float32"] != 0).double().mean()) > 0.95
    assert float((found["old"] != 0).double().mean()) < 0.05
    assert cosine(found["old"], found["float32"]) < 0.2
    assert (seen != 0).sum() > 1.5 * (found["old"] != 0).sum()  # what an engine sees comes after


# --- who has a master ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_frozen_has_no_master(name: str) -> None:
    """Adapters are of the model's dtype; peft would make them float32."""
    learner = make_learner(narrow(**SETTINGS[name]))
    for parameter_name, parameter in learner.policy.model.named_parameters():
        trained = {"whole": True, "frozen": ".visual." not in parameter_name, "lora": "lora_" in parameter_name}[name]
        assert (master(parameter) is not parameter) == trained
        assert parameter.dtype == torch.bfloat16
    assert all(master(p).dtype == torch.float32 for p in learner.parameters.values())


@pytest.mark.parametrize(("dtype", "expected"), [("float32", (4, 0, 8, 4)), ("bfloat16", (2, 4, 8, 4))])
def test_the_bytes_of_a_parameter_are_those_of_the_document(dtype: str, expected: tuple[int, ...]) -> None:
    loaded = load(dtype=dtype)
    learner = make_learner(loaded)
    samples = samples_of(loaded)
    learner.step(samples)
    learner.optimizer.param_groups[0]["lr"] = 0.0
    for batch in learner._micro_batches(samples):
        learner._score(batch, learner.policy, learner.vision, 1.0)[0].sum().backward()
    parameters = list(learner.parameters.values())
    count = sum(p.numel() for p in parameters)
    held: list[list[Tensor]] = [
        parameters,
        [master(p) for p in parameters if master(p) is not p],
        [t for state in learner.optimizer.state.values() for name, t in state.items() if name != "step"],
        gradients(learner.optimizer) + [p.grad for p in parameters if p.grad is not None and master(p) is not p],
    ]
    assert tuple(sum(t.numel() * t.element_size() for t in part) / count for part in held) == expected
    row = " | ".join(str(n) if n else "–" for n in (*expected, sum(expected)))
    assert f"| {dtype} | {row} |" in DOCUMENT.read_text()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def write(folder: Path, learner: Learner, step: int = 2) -> Path:
    return save_learner(folder, step, learner, select(), {}, keep=2)


def trained(loaded: LoadedModel, steps: int = 2) -> Learner:
    learner: Learner = make_learner(loaded, lr=1e-5)
    for _ in range(steps):
        learner.step(samples_of(loaded))
    return learner


@pytest.mark.parametrize("name", SETTINGS)
def test_a_restored_learner_in_bfloat16_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    loaded = narrow(**SETTINGS[name])
    samples = samples_of(loaded)
    learner = trained(loaded)
    path = write(tmp_path, learner)
    assert {k for k in load_file(path / "optimizer.safetensors") if k.startswith("master.")} == {
        f"master.{n}" for n, p in learner.parameters.items() if p.dtype == torch.bfloat16
    }
    unbroken = learner.step(samples), masters(learner), weights(learner)

    restored = make_learner(narrow(**SETTINGS[name]), lr=1e-5)
    load_learner(path, restored, select())
    assert equal(weights(restored), {n: p.to(unbroken[2][n].dtype) for n, p in masters(restored).items()})
    assert learned(restored.step(samples)) == learned(unbroken[0])
    assert equal(masters(restored), unbroken[1]) and equal(weights(restored), unbroken[2])


def test_weights_alone_do_not_tell_what_they_were_rounded_from(tmp_path: Path) -> None:
    loaded = narrow()
    learner = trained(loaded)
    path = write(tmp_path, learner)
    change(path / "optimizer.safetensors", lambda name, t: None if name.startswith("master.") else t)
    as_of_old(path)
    restored = make_learner(narrow(), lr=1e-5)
    load_learner(path, restored, select())
    assert equal(weights(restored), weights(learner))
    assert equal(masters(restored), {n: p.float() for n, p in weights(learner).items()})
    assert not equal(masters(restored), masters(learner))


def test_a_checkpoint_of_the_time_before_masters(tmp_path: Path) -> None:
    """Weights and moments in bfloat16, no master."""
    loaded = narrow()
    learner = trained(loaded)
    path = write(tmp_path, learner)
    change(
        path / "optimizer.safetensors",
        lambda name, t: None if name.startswith("master.") else t if name.startswith("step.") else t.bfloat16(),
    )
    as_of_old(path)
    restored = make_learner(narrow(), lr=1e-5)
    load_learner(path, restored, select())
    for name, parameter in restored.parameters.items():
        state = restored.optimizer.state[master(parameter)]
        old = learner.optimizer.state[master(learner.parameters[name])]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert state[moment].dtype == torch.float32
            assert torch.equal(state[moment], old[moment].bfloat16().float())
        assert float(state["step"]) == 2.0
    before = masters(restored)
    assert restored.step(samples_of(loaded))["skipped_updates"] == 0
    assert not equal(masters(restored), before)


def test_a_checkpoint_serves_a_model_in_another_dtype(tmp_path: Path) -> None:
    """Each way, weights in float32 and masters are the same numbers."""
    for folder, make, other in (("a", narrow, rounded), ("b", rounded, narrow)):
        learner, loaded = trained(make()), other()
        restored = make_learner(loaded, lr=1e-5)
        load_learner(write(tmp_path / folder, learner), restored, select())
        found = masters(restored)
        assert equal(found, masters(learner))
        assert equal(weights(restored), {n: found[n].to(p.dtype) for n, p in restored.parameters.items()})
        restored.step(samples_of(loaded))
        assert not equal(masters(restored), found)


def test_a_checkpoint_of_float32_holds_what_it_always_did(tmp_path: Path) -> None:
    learner = trained(load())
    path = write(tmp_path, learner)
    names = {f"{kind}.{n}" for kind in ("exp_avg", "exp_avg_sq", "step") for n in learner.parameters}
    assert load_file(path / "optimizer.safetensors").keys() == names


# --- the critic ------------------------------------------------------------------------------------------------------


def with_critic(loaded: LoadedModel, backbone: Any) -> Learner:
    settings = AlgorithmConfig(preset="trico", kl_coef=0.0, max_logprob_gap=1e6)
    return Learner(
        loaded.policy,
        VisionFeatures(loaded.policy, loaded.processor, 1 << 24),
        settings,
        OptimConfig(lr=1e-5),
        1.0,
        10,
        CriticConfig(backbone=backbone, lr=1e-5),
    )


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_a_critic_in_bfloat16_goes_on_bit_by_bit(tmp_path: Path, backbone: str) -> None:
    """Its head is in float32; a separate backbone has masters of its own, and the policy's get no gradient of it."""

    shown = [an_image(5)]

    def step(learner: Learner) -> dict[str, float]:
        made = [trajectory(loaded, seed, (3, 2), shown, group="g", rewards=(0.5 * seed, 1 - seed)) for seed in range(2)]
        samples = learner.score(export(made, "concat", "sum", 1.0, "tiny"))
        return learner.step(assign_advantages(samples, learner.algorithm))

    def everything(learner: Learner) -> dict[str, Tensor]:
        assert learner.critic is not None
        both = learner.parameters | learner.critic.parameters
        found = both | {f"master.{name}": master(p) for name, p in both.items()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    loaded = narrow()
    learner = with_critic(loaded, backbone)
    assert learner.critic is not None
    own = {n: p for n, p in learner.critic.parameters.items() if master(p) is not p}
    assert len(own) == (len(learner.critic.parameters) - 2 if backbone == "separate" else 0)
    assert not {id(master(p)) for p in own.values()} & {id(master(p)) for p in learner.parameters.values()}
    start = everything(learner)
    for _ in range(2):
        step(learner)
    assert all(not torch.equal(t, start[n]) for n, t in everything(learner).items() if n.startswith("master."))
    path = write(tmp_path, learner)
    metrics = step(learner)
    restored = with_critic(narrow(), backbone)
    load_learner(path, restored, select())
    assert learned(step(restored)) == learned(metrics)
    assert equal(everything(restored), everything(learner))
