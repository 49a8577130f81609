"""The update: how many optimiser steps on which samples, by which rule, and what is done about bad numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from npu_vlrl.kernels import op
from npu_vlrl.learner import trainer
from npu_vlrl.learner.trainer import Learner, LearnerError
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.types import Sample, Trajectory
from npu_vlrl.workflow.export import export
from tests.support.learning import (
    Probe,
    assign_advantages,
    distance,
    load,
    make_learner,
    plain_logits,
    plain_model,
    samples_of,
    tiny_folder,
    trajectory,
    with_advantage,
)

torch.set_num_threads(1)


@pytest.fixture
def loaded() -> LoadedModel:
    return load()


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.parameters.items()}


def unchanged(learner: Learner, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(p, before[name]) for name, p in learner.parameters.items())


# --- optimiser steps -------------------------------------------------------------------------------------------------


def count_steps(learner: Learner, chosen: list[list[str]]) -> Callable[[], int]:
    """Counts what the optimiser really does, and notes the groups of every update in `chosen`."""
    steps: list[int] = []
    learner.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    original = learner._update

    def note(samples: Sequence[Sample], *arguments: Any, **options: Any) -> Any:
        chosen.append([sample.id for sample in samples])
        return original(samples, *arguments, **options)

    mock.patch.object(learner, "_update", note).start()
    return lambda: len(steps)


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (2, 1), (1, 3), (2, 2), (3, 1)])
def test_updates_and_epochs(loaded: LoadedModel, updates: int, epochs: int) -> None:
    made = [trajectory(loaded, seed, (3,), group=f"g{seed // 2}") for seed in range(6)]
    learner = make_learner(loaded, {"updates": updates, "epochs": epochs})
    samples = [with_advantage(s, 1.0) for s in export(made, "concat", "sum", 1.0, "tiny")]
    samples = [*samples[::2], *samples[1::2]]  # members of a group are apart
    chosen: list[list[str]] = []
    counted = count_steps(learner, chosen)
    learner.step(samples)
    mock.patch.stopall()
    assert counted() == learner.updates == updates * epochs == len(chosen)
    assert learner.total_updates == 10 * updates * epochs
    for epoch in range(epochs):
        parts = chosen[epoch * updates : (epoch + 1) * updates]
        assert sorted(name for part in parts for name in part) == sorted(sample.id for sample in samples)
        groups = [{name.split("/")[0] for name in part} for part in parts]
        assert sum(map(len, groups)) == 3  # no group is in two mini-batches


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_warm_up_is_counted_in_training_steps(loaded: LoadedModel, updates: int, epochs: int) -> None:
    """Two steps, however many updates each has: the last update of a step ends at half of the rate, and at all of it.

    A learner that goes on after the first step does the same.
    """
    settings = {"updates": updates, "epochs": epochs}
    first, second = (make_learner(loaded, settings, lr=1e-3, warmup_steps=2) for _ in range(2))
    rates = [first.step(samples_of(loaded))["lr"] for _ in range(3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])
    second.updates = updates * epochs
    assert second.step(samples_of(loaded))["lr"] == pytest.approx(1e-3)


def test_more_updates_than_groups(loaded: LoadedModel) -> None:
    """Groups may fail in a rollout; a mini-batch without one is left out."""
    learner = make_learner(loaded, {"updates": 5})
    metrics = learner.step(samples_of(loaded))
    assert learner.updates == 2 and metrics["skipped_updates"] == 0


def adamw_by_hand(
    values: dict[str, Tensor], gradients: list[dict[str, Tensor]], rates: list[float], decay: float, limit: float
) -> list[float]:
    """Decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2) with betas 0.8 and 0.95; returns the norms."""
    first = {name: torch.zeros_like(v) for name, v in values.items()}
    second = {name: torch.zeros_like(v) for name, v in values.items()}
    norms = []
    for step, (batch, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in batch.values())))
        shrink = min(1.0, limit / norms[-1])
        for name, gradient in batch.items():
            g = gradient * shrink
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            unbiased = second[name] / (1 - 0.95**step)
            values[name] *= 1 - rate * decay
            values[name] -= rate * (first[name] / (1 - 0.8**step)) / (unbiased.sqrt() + 1e-8)
    return norms


@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_three_steps_of_adamw_with_warm_up_and_clipping(loaded: LoadedModel, limit: float) -> None:
    samples = samples_of(loaded)
    optim: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    learner = make_learner(loaded, max_grad_norm=limit, **optim)
    expected = weights(learner)
    gradients, norms = [], []
    for rate in (0.5e-2, 1e-2, 1e-2):
        gradients.append(make_learner(loaded, kind=Probe).measure(samples))
        metrics = learner.step(samples)
        assert metrics["lr"] == pytest.approx(rate)
        norms.append(metrics["grad_norm"])
    by_hand = adamw_by_hand(expected, gradients, [0.5e-2, 1e-2, 1e-2], 0.1, limit)
    assert norms == pytest.approx(by_hand, rel=1e-5)  # as it was before clipping
    assert (norms[0] > limit) is (limit < 1)
    for name, parameter in learner.parameters.items():
        assert torch.allclose(parameter, expected[name], atol=2e-5), name


def test_the_loss_falls(loaded: LoadedModel) -> None:
    """The end of the chain, seen from outside: a rewarded sample gets more likely, a punished one less."""
    learner = make_learner(loaded)
    good, bad = (with_advantage(s, a) for s, a in zip(samples_of(loaded)[:2], (1.0, -1.0), strict=True))

    def likelihoods() -> list[float]:
        with torch.no_grad():
            batches = [learner._micro_batches([sample])[0] for sample in (good, bad)]
            return [learner._score(b, loaded.policy, learner.vision, 1.0)[0].mean().item() for b in batches]

    before = likelihoods()
    for _ in range(3):
        learner.step([good, bad])
    after = likelihoods()
    assert after[0] > before[0] + 0.1 and after[1] < before[1] - 0.1


def test_gradient_checkpointing_changes_no_gradient() -> None:
    samples = samples_of(load())
    runs = {}
    for checkpointing in (False, True):
        loaded = load(gradient_checkpointing=checkpointing)
        calls: list[int] = []
        loaded.policy.text.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=calls: seen.append(1))
        learner = make_learner(loaded, kind=Probe)
        runs[checkpointing] = learner.measure(samples), learner.loss, len(calls)
    assert distance(runs[True][0], runs[False][0]) < 1e-6
    assert runs[True][1] == pytest.approx(runs[False][1], rel=1e-6)
    assert (runs[False][2], runs[True][2]) == (1, 2)  # it was on: the layer ran again in the backward pass


def test_temperature_divides_the_logits(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    learner = make_learner(loaded)
    learner.temperature = 0.7
    hot: dict[str, Any] = {}
    with mock.patch.object(trainer, "policy_loss", side_effect=lambda *a, **k: (a[0].sum() * 0, keep(hot, a))):
        learner.step(samples)
    forbidden = loaded.policy.forbidden_V
    expected = []
    for sample, logits in zip(samples, plain_logits(plain_model(tiny_folder()), loaded, samples), strict=True):
        scores = (logits / 0.7).masked_fill(forbidden, -torch.inf).log_softmax(-1)
        mask = sample.loss_mask
        expected += [scores[t - 1, sample.token_ids[t]].item() for t in range(1, len(sample)) if mask[t]]
    assert hot["logprobs"] == pytest.approx(expected, abs=1e-5)


def keep(into: dict[str, Any], arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    into["logprobs"] = arguments[0].tolist()
    return {"gap_max": torch.zeros(()), "tokens_sum": torch.ones(())}


# --- supervised steps ------------------------------------------------------------------------------------------------


def test_supervised_loss_is_the_mean_over_trained_tokens(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    logits = plain_logits(plain_model(tiny_folder()), loaded, samples)
    losses = []
    for sample, rows in zip(samples, logits, strict=True):
        scores = rows.masked_fill(loaded.policy.forbidden_V, -torch.inf).log_softmax(-1)
        mask = sample.loss_mask
        losses += [-scores[t - 1, sample.token_ids[t]].item() for t in range(len(sample)) if mask[t]]
    learner = make_learner(loaded, micro_batch_tokens=50)
    assert learner.supervise(samples, 1e-3) == pytest.approx(sum(losses) / 32, rel=1e-5)
    assert learner.optimizer.param_groups[0]["lr"] == 1e-3
    assert learner.supervise(samples, 1e-3) < sum(losses) / 32  # it took a step downhill


def test_supervised_gradient_does_not_depend_on_micro_batches(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    whole, alone = (make_learner(loaded, kind=Probe, micro_batch_tokens=budget) for budget in (10_000, 1))
    assert whole.supervise(samples, 1.0) == pytest.approx(alone.supervise(samples, 1.0), rel=1e-6)
    given = [{n: g for n, g in learner.gradients.items() if g is not None} for learner in (whole, alone)]
    assert distance(*given) < 1e-6


# --- numbers that are not finite -------------------------------------------------------------------------------------


def poisoned_op(token: int) -> Any:
    """The real op, but the log-probability of one target id is NaN."""

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropy = op("logprob_entropy")(hidden, weight, targets, *rest)
        return torch.where(targets == token, torch.nan, 1.0) * logprobs, entropy

    return lambda name: score


@pytest.mark.parametrize("where", ["advantage", "logprob"])
def test_a_bad_number_skips_the_update_and_names_the_sample(loaded: LoadedModel, where: str) -> None:
    samples = samples_of(loaded)
    learner = make_learner(loaded, micro_batch_tokens=50)
    learner.step(samples)  # moments exist
    before = weights(learner)
    moments = [{k: v.clone() for k, v in state.items()} for state in learner.optimizer.state.values()]
    bad, patched = list(samples), op
    if where == "advantage":
        bad[2] = with_advantage(samples[2], float("nan"))
    else:
        only_here = set(samples[2].segments[1].token_ids)
        only_here -= {t for i in (0, 1, 3) for t in samples[i].token_ids}
        patched = poisoned_op(min(only_here))
    with mock.patch.object(trainer, "op", patched):
        metrics = learner.step(bad)
    assert learner.skipped == ["g1/2"]
    assert metrics["skipped_updates"] == 1 and math.isnan(metrics["grad_norm"])
    assert unchanged(learner, before)
    for state, kept in zip(learner.optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(state[key], kept[key]) for key in kept)
    assert all(p.grad is None for p in learner.parameters.values())

    metrics = learner.step(samples)
    assert metrics["skipped_updates"] == 0 and math.isfinite(metrics["grad_norm"])
    assert not unchanged(learner, before) and learner.skipped == ["g1/2"]
    assert all(p.isfinite().all() for p in learner.parameters.values())


def test_only_the_mini_batch_with_the_bad_number_is_skipped(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    samples[0] = with_advantage(samples[0], float("nan"))
    learner = make_learner(loaded, {"updates": 2})
    before = weights(learner)
    metrics = learner.step(samples)
    assert metrics["skipped_updates"] == 1 and learner.skipped == ["g0/0"] and learner.updates == 2
    assert not unchanged(learner, before) and all(p.isfinite().all() for p in learner.parameters.values())


def test_a_broken_reference_skips_the_update_though_the_gradient_is_finite(loaded: LoadedModel) -> None:
    """k3 clamps an exponent, and a clamp gives NaN the gradient zero: only the loss tells."""
    samples = samples_of(loaded)
    learner = make_learner(loaded, {"kl_coef": 0.1})
    with torch.no_grad():
        next(learner.reference.vision.parameters()).fill_(torch.nan)
    before = weights(learner)
    metrics = learner.step(samples)
    assert metrics["skipped_updates"] == 1 and unchanged(learner, before)
    assert learner.skipped == ["g0/0", "g0/1", "g1/3"]  # the other one has no image


# --- learner and engine disagree -------------------------------------------------------------------------------------


def with_true_logprobs(learner: Learner, samples: Sequence[Sample], error: float = 0.0) -> list[Sample]:
    """As if the engine had sampled them, with `error` on the first token of the last sample."""
    found = []
    for sample in samples:
        (batch,) = learner._micro_batches([sample])
        with torch.no_grad():
            values = learner._score(batch, learner.policy, learner.vision, 1.0)[0].tolist()
        if sample is samples[-1]:
            values[0] += error
        segments = list(sample.segments)
        for index in sample.trained:
            length = len(segments[index])
            segments[index] = replace(segments[index], special=learner.policy.special, logprobs=tuple(values[:length]))
            values = values[length:]
        found.append(replace(sample, segments=tuple(segments)))
    return found


def test_an_engine_that_agrees_is_trusted(loaded: LoadedModel) -> None:
    learner = make_learner(loaded, {"max_logprob_gap": 1e-4}, micro_batch_tokens=50)
    metrics = learner.step(with_true_logprobs(learner, samples_of(loaded)))
    assert metrics["logprob_gap"] < 1e-5 and metrics["ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("budget", [1, 50, 10_000])
def test_one_token_that_differs_stops_the_run_before_the_step(loaded: LoadedModel, budget: int) -> None:
    learner = make_learner(loaded, {"max_logprob_gap": 0.05}, micro_batch_tokens=budget)
    before = weights(learner)
    with pytest.raises(LearnerError, match=r"differs by 0\.0[67].* algorithm\.max_logprob_gap=0\.05: engine and"):
        learner.step(with_true_logprobs(learner, samples_of(loaded), 0.0625))
    assert unchanged(learner, before) and not learner.optimizer.state
    assert all(p.grad is None for p in learner.parameters.values())


@pytest.mark.parametrize(("dtype", "most"), [("float32", "0.05"), ("bfloat16", "1.0")])
def test_the_gap_that_is_allowed_follows_the_precision(dtype: str, most: str) -> None:
    coarse = load(dtype=dtype)
    learner = make_learner(coarse, {"max_logprob_gap": None}, lr=1e-9)
    samples = with_true_logprobs(learner, samples_of(coarse), float(most) / 2)
    assert learner.step(samples)["logprob_gap"] > float(most) / 4
    with pytest.raises(LearnerError, match=f"algorithm.max_logprob_gap={most}: engine"):
        learner.step(with_true_logprobs(learner, samples_of(coarse), float(most) * 2))


def test_the_reported_gap_is_that_of_all_micro_batches(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    for order in (samples, samples[::-1]):
        learner = make_learner(loaded, {"max_logprob_gap": 0.05}, micro_batch_tokens=1, lr=1e-9)
        metrics = learner.step(with_true_logprobs(learner, order, 0.03125))
        assert metrics["logprob_gap"] == pytest.approx(0.03125, abs=1e-5)


def test_a_number_that_is_not_finite_hides_no_gap(loaded: LoadedModel) -> None:
    samples = samples_of(loaded)
    only_here = set(samples[3].segments[1].token_ids) - {t for i in range(3) for t in samples[i].token_ids}
    for order in (samples, samples[::-1]):
        learner = make_learner(loaded, {"max_logprob_gap": 0.05}, micro_batch_tokens=1)
        with mock.patch.object(trainer, "op", poisoned_op(min(only_here))), pytest.raises(LearnerError):
            learner.step(order)  # the logprobs of these samples are made up


def test_a_loss_that_overflows_where_the_ratio_is_clipped_names_every_sample(loaded: LoadedModel) -> None:
    """The token's own gradient is zero there, and all others are finite: again only the loss tells."""
    learner = make_learner(loaded, {"aggregation": "constant", "loss_constant": 0.01})
    clipped = export([trajectory(loaded, 9, (1,))], "concat", "sum", 1.0, "tiny")
    samples = with_true_logprobs(learner, [*samples_of(loaded), *clipped], error=-1.0)  # its ratio is e
    samples[-1] = with_advantage(samples[-1], 2e38)
    before = weights(learner)
    metrics = learner.step(samples)
    assert metrics["skipped_updates"] == 1 and unchanged(learner, before)
    assert learner.skipped == [sample.id for sample in samples]


# --- batches at the edge ---------------------------------------------------------------------------------------------


def step_on(loaded: LoadedModel, made: list[Trajectory], **algorithm: Any) -> tuple[Probe, dict[str, float]]:
    learner = make_learner(loaded, algorithm, Probe)
    samples = assign_advantages(export(made, "concat", "sum", 1.0, "tiny"), learner.algorithm)
    return learner, learner.step(samples)


def test_every_completion_cut_off(loaded: LoadedModel) -> None:
    made = [trajectory(loaded, s, (4, 4), group="g", rewards=(0.0, float(s)), cut=True) for s in range(3)]
    learner, metrics = step_on(loaded, made)
    assert metrics["tokens"] == 24 and math.isfinite(metrics["pg_loss"])
    assert all(g is None or g.isfinite().all() for g in learner.gradients.values())
    assert any(g is not None and g.any() for g in learner.gradients.values())


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "rloo"])
def test_a_group_of_one_and_equal_rewards_teach_nothing(loaded: LoadedModel, preset: str) -> None:
    lonely = [trajectory(loaded, 1, (4,), group="alone", rewards=(1.0,))]
    equal = [trajectory(loaded, s, (3,), group="equal", rewards=(0.1,)) for s in (2, 3, 4)]
    learner, metrics = step_on(loaded, [*lonely, *equal], preset=preset)
    assert metrics["skipped_updates"] == 0
    assert not any(g is not None and g.any() for g in learner.gradients.values())


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_group_that_lost_a_member(loaded: LoadedModel, advantage: str) -> None:
    made = [trajectory(loaded, s, (3,), group="ab"[s > 2], rewards=(float(s % 2),)) for s in range(5)]
    learner, metrics = step_on(loaded, made, advantage=advantage)
    assert metrics["skipped_updates"] == 0 and any(g is not None and g.any() for g in learner.gradients.values())


def test_scores_are_float32_and_nothing_has_none(loaded: LoadedModel) -> None:
    learner = make_learner(loaded, {"kl_coef": 0.1})
    assert learner.score([]) == []
    for sample in learner.score(samples_of(loaded)):
        assert sample.scores.reference_N is not None and sample.scores.proximal_N is None
        assert sample.scores.reference_N.dtype == "float32" and len(sample.scores.reference_N) == sample.n_scored
