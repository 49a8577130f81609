"""KL to the policy as it was: zero at the start, the right gradient later, and a reference that never moves."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Sample
from tests.support.learning import (
    SMALL_LORA,
    Probe,
    distance,
    load,
    make_learner,
    plain_logprobs,
    plain_model,
    samples_of,
    tiny_folder,
    with_advantage,
)

torch.set_num_threads(1)


def references(learner: Learner, samples: Sequence[Sample]) -> dict[str, Tensor]:
    found = {sample.id: sample.scores.reference_N for sample in learner.score(samples)}
    return {name: torch.from_numpy(values) for name, values in found.items() if values is not None}


def move(learner: Learner, scale: float = 0.02) -> None:
    """The policy goes elsewhere, as if trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    learner.vision.weights_changed()


def without_rewards(samples: list[Sample]) -> list[Sample]:
    return [with_advantage(sample, 0.0) for sample in samples]


def stacked(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([logprobs for logprobs, _ in pairs])


@pytest.fixture
def loaded() -> LoadedModel:
    return load()


@pytest.mark.parametrize("settings", [{}, {"freeze_vision": True}, {"lora": SMALL_LORA}])
def test_at_the_start_it_is_zero_and_pushes_nowhere(settings: dict[str, Any]) -> None:
    loaded = load(**settings)
    learner = make_learner(loaded, {"kl_coef": 0.5, "kl_kind": "k3"}, Probe)
    metrics = learner.step(without_rewards(samples_of(loaded)))
    assert 0 <= metrics["kl"] < 1e-10
    assert max(float(g.abs().max()) for g in learner.gradients.values() if g is not None) < 1e-5


@pytest.mark.parametrize("settings", [{}, {"freeze_vision": True}, {"lora": SMALL_LORA}])
def test_its_value_is_that_of_plain_transformers(settings: dict[str, Any]) -> None:
    loaded = load(**settings)
    samples = samples_of(loaded)
    learner = make_learner(loaded, {"kl_coef": 0.5})
    move(learner)
    (batch,) = learner._micro_batches(samples)
    with torch.no_grad():
        now = learner._score(batch, loaded.policy, learner.vision, 1.0)[0]
        start = stacked(plain_logprobs(plain_model(tiny_folder()), loaded, samples))
    assert (now - start).abs().max() > 0.05
    expected = (torch.exp(start - now) - 1 + now - start).mean()  # Schulman's k3
    assert learner.step(samples)["kl"] == pytest.approx(float(expected), rel=1e-3)


def test_its_gradient_is_what_it_adds_to_the_loss(loaded: LoadedModel) -> None:
    """The loss is a sum, so the gradient with rewards and KL is that of the rewards plus that of the KL alone."""
    samples = samples_of(loaded)
    learners = [make_learner(loaded, {"kl_coef": coef}, Probe) for coef in (0.3, 0.0, 0.3)]
    move(learners[0])
    both, rewards, kl = (
        learner.measure(batch)
        for learner, batch in zip(learners, (samples, samples, without_rewards(samples)), strict=True)
    )
    assert distance({name: rewards[name] + kl[name] for name in both}, both) < 1e-5
    assert max(float(g.abs().max()) for g in kl.values()) > 1e-3


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_equal_rewards_leave_the_gradient_of_the_kl(loaded: LoadedModel, kind: str) -> None:
    samples = without_rewards(samples_of(loaded))
    learner = make_learner(loaded, {"kl_coef": 0.1, "kl_kind": kind}, Probe)
    move(learner)
    gradient = learner.measure(samples)
    assert math.isfinite(learner.loss) and all(g.isfinite().all() for g in gradient.values())
    assert max(float(g.abs().max()) for g in gradient.values()) > 1e-4
    assert learner.loss != 0


def test_the_reference_never_changes(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    learner = make_learner(loaded, {"kl_coef": 0.05}, lr=1e-2)
    assert learner.reference is not loaded.policy
    before = {name: tensor.clone() for name, tensor in learner.reference.model.state_dict().items()}
    first = references(learner, samples)
    kls = [learner.step(samples)["kl"] for _ in range(3)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.reference.model.state_dict().items())
    assert not any(p.requires_grad for p in learner.reference.model.parameters())
    again = references(learner, samples)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert kls[0] < 1e-10 and min(kls[1:]) > 1e-4  # it is the policy that moves


def test_the_reference_of_an_adapter_is_the_model_without_it() -> None:
    loaded = load(lora=SMALL_LORA)
    samples = samples_of(loaded)
    learner = make_learner(loaded, {"kl_coef": 0.05}, lr=3e-2)
    assert learner.reference is loaded.policy  # no copy
    for _ in range(2):
        learner.step(samples)
    kl = learner.step(samples)["kl"]
    found = references(learner, samples)
    with torch.no_grad():
        base = plain_logprobs(plain_model(tiny_folder()), loaded, samples)
    for sample, (expected, _) in zip(samples, base, strict=True):
        assert torch.allclose(found[sample.id], expected, atol=1e-5)
    assert kl > 1e-4
    (batch,) = learner._micro_batches(samples)
    with torch.no_grad():  # the adapter is back after the reference was asked
        now = learner._score(batch, loaded.policy, learner.vision, 1.0)[0]
    assert (now - stacked(base)).abs().max() > 1e-2


def test_a_trained_tower_and_the_reference_see_with_their_own_weights(loaded: LoadedModel) -> None:
    learner = make_learner(loaded, {"kl_coef": 0.05})
    samples = samples_of(loaded)
    first = references(learner, samples)
    with torch.no_grad():
        for parameter in loaded.policy.vision.parameters():
            parameter *= 1.5
    again = references(learner, samples)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert learner.step(without_rewards(samples))["kl"] > 1e-6


def test_a_frozen_tower_encodes_each_image_once_for_policy_and_reference() -> None:
    loaded = load(freeze_vision=True)
    learner = make_learner(loaded, {"kl_coef": 0.05})
    runs: list[int] = []
    for tower in {*loaded.policy.vision.roots, *learner.reference.vision.roots}:  # one and the same
        tower.register_forward_pre_hook(lambda _, args, named: runs.append(len(named["grid_thw"])), with_kwargs=True)
    for _ in range(3):
        learner.step(samples_of(loaded))
    assert sum(runs) == 3  # distinct images
    assert learner.vision.encoded == 3
