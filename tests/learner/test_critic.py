"""The critic: where it stands, what it learns from, and that its state survives a stop."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_vlrl.config import AlgorithmConfig, CriticConfig, OptimConfig
from npu_vlrl.hardware import select
from npu_vlrl.learner.checkpoint import CheckpointError
from npu_vlrl.learner.state import load_learner, save_learner
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Sample
from npu_vlrl.workflow.export import export
from tests.support.learning import (
    SMALL_LORA,
    an_image,
    assign_advantages,
    load,
    make_learner,
    plain_logits,
    plain_model,
    samples_of,
    tiny_folder,
    trajectory,
)

torch.set_num_threads(1)

BACKBONES = ["separate", "shared"]


def with_critic(
    loaded: LoadedModel, critic: dict[str, Any] | None = None, algorithm: dict[str, Any] | None = None, **optim: Any
) -> Learner:
    settings = AlgorithmConfig(**({"preset": "trico", "kl_coef": 0.0, "max_logprob_gap": 1e6} | (algorithm or {})))
    return Learner(
        loaded.policy,
        VisionFeatures(loaded.policy, loaded.processor, 1 << 24),
        settings,
        OptimConfig(**({"lr": 1e-3, "micro_batch_tokens": 100} | optim)),
        1.0,
        10,
        CriticConfig(**({"lr": 1e-2} | (critic or {}))),
    )


def episodes(loaded: LoadedModel, style: Any = "concat") -> list[Sample]:
    made = [
        trajectory(loaded, seed, (3, 2), group="g", rewards=(0.5 * seed, 1.0 - seed), images=[an_image(5)])
        for seed in range(3)
    ]
    made = [replace(one, member=i) for i, one in enumerate(made)]
    return export(made, style, "sum", 1.0, "tiny")


def step(learner: Learner, samples: list[Sample]) -> dict[str, float]:
    return learner.step(assign_advantages(learner.score(samples), learner.algorithm))


def without_clocks(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "second" not in name}


def values(learner: Learner, samples: list[Sample]) -> np.ndarray:
    found = [sample.scores.values_N for sample in learner.score(samples)]
    return np.concatenate([part for part in found if part is not None])


def weights(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def moved(parameters: dict[str, Any], before: dict[str, Tensor]) -> set[str]:
    return {name for name, p in parameters.items() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_values_are_the_head_on_the_state_before_each_token(backbone: str) -> None:
    loaded = load()
    learner = with_critic(loaded, {"backbone": backbone})
    assert learner.critic is not None
    samples = episodes(loaded)
    assert not values(learner, samples).any()  # 0 at the start
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(learner.critic.head.weight.shape, generator=generator)
    with torch.no_grad():
        learner.critic.head.weight.copy_(weight)
        learner.critic.head.bias.fill_(0.25)
    model = plain_model(tiny_folder())
    expected = []
    for sample in samples:  # one by one, through transformers
        ids = torch.tensor([sample.token_ids])
        assert loaded.processor is not None
        (image,) = sample.images
        output = model(
            input_ids=ids,
            pixel_values=loaded.processor.patches(image),
            image_grid_thw=torch.tensor([image.grid]),
            mm_token_type_ids=torch.eq(ids, loaded.policy.special.image or -1).long(),
            output_hidden_states=True,
        )
        hidden = output.hidden_states[-1][0]
        at = [i - 1 for i, trained in enumerate(sample.loss_mask) if trained]
        expected.append((hidden[at] @ weight.T)[:, 0] + 0.25)
    np.testing.assert_allclose(values(learner, samples), torch.cat(expected).detach().numpy(), atol=2e-5)


@pytest.mark.parametrize("style", ["concat", "individual"])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("advantage", ["gae", "masked_gae", "bi_level_gae", "turn_wise_gae"])
def test_it_learns_what_was_earned(advantage: str, backbone: str, style: str) -> None:
    loaded = load()
    learner = with_critic(
        loaded, {"backbone": backbone, "value_clip": None, "lr": 1e-2, "warmup_steps": 100}, {"advantage": advantage}
    )
    samples = episodes(loaded, style)
    first = step(learner, samples)["critic/value_loss"]
    for _ in range(25):
        last = step(learner, samples)["critic/value_loss"]
    assert 0 <= last < first / 2


def test_turn_wise_gae_trains_the_critic_at_the_ends_of_turns_only() -> None:
    loaded = load()
    learner = with_critic(loaded, algorithm={"advantage": "turn_wise_gae"})
    made = assign_advantages(learner.score(episodes(loaded)), learner.algorithm)
    for sample in made:
        assert sample.credit is not None
        assert sample.credit.critic_N.tolist() == [False, False, True, False, True]


def test_its_optimiser_is_its_own_and_warms_up_alone() -> None:
    loaded = load()
    learner = with_critic(loaded, {"warmup_steps": 2, "lr": 1e-2}, lr=1e-3)
    assert learner.critic is not None
    samples = episodes(loaded)
    policy, critic = weights(learner.parameters), weights(learner.critic.parameters)
    for _ in range(2):
        metrics = step(learner, samples)
        assert "grad_norm" not in metrics and metrics["critic/grad_norm"] > 0
        assert not moved(learner.parameters, policy)
    changed = moved(learner.critic.parameters, critic)
    assert "critic.head.weight" in changed and any(".visual." in name for name in changed)
    assert learner.critic.optimizer.param_groups[0]["lr"] == 1e-2
    metrics = step(learner, samples)
    assert metrics["grad_norm"] > 0 and moved(learner.parameters, policy)
    assert learner.optimizer.param_groups[0]["lr"] == 1e-3


def test_a_shared_backbone_learns_from_both_losses() -> None:
    """Of the value loss it gets the share that is asked for; the head gets all."""
    gradients = {}
    for share in (0.0, 0.5, 1.0):
        loaded = load()
        learner = with_critic(loaded, {"backbone": "shared", "backbone_grad": share, "value_clip": None})
        assert learner.critic is not None
        with torch.no_grad():
            learner.critic.head.weight.fill_(0.1)
        samples = assign_advantages(learner.score(episodes(loaded)), learner.algorithm)
        zero = [
            replace(s, credit=replace(s.credit, advantages_N=s.credit.advantages_N * 0)) for s in samples if s.credit
        ]
        kept: dict[str, Tensor] = {}

        def keep(*_: Any, learner: Learner = learner, kept: dict[str, Tensor] = kept) -> float:
            kept |= {n: p.grad.clone() for n, p in learner.parameters.items() if p.grad is not None}
            return 0.0

        learner._apply = keep  # type: ignore[method-assign]
        learner.step(zero)
        gradients[share] = kept
        assert learner.critic.parameters.keys() == {"critic.head.weight", "critic.head.bias"}
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert not gradients[0.0][name].any() and gradients[1.0][name].abs().max() > 1e-6
    torch.testing.assert_close(gradients[0.5][name], gradients[1.0][name] / 2, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("settings", [{"freeze_vision": True}, {"lora": SMALL_LORA}], ids=["frozen", "lora"])
def test_a_separate_backbone_keeps_what_is_frozen(settings: dict[str, Any]) -> None:
    loaded = load(**settings)
    learner = with_critic(loaded)
    assert learner.critic is not None
    names = {name.removeprefix("critic.") for name in learner.critic.parameters} - {"head.weight", "head.bias"}
    assert names == {name for name in loaded.policy.trainable() if "lm_head" not in name}
    assert learner.critic.vision is learner.vision  # a frozen tower sees the same
    before = weights(learner.critic.parameters)
    for _ in range(2):  # the head begins at 0, so the backbone's gradient comes with the second step
        step(learner, episodes(loaded))
    assert moved(learner.critic.parameters, before)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_restored_critic_goes_on_bit_by_bit(tmp_path: Path, backbone: str) -> None:
    loaded = load()
    samples = episodes(loaded)
    learner = with_critic(loaded, {"backbone": backbone})
    assert learner.critic is not None
    for _ in range(2):
        step(learner, samples)
    path = save_learner(tmp_path, 2, learner, select(), {}, keep=2)
    metrics = without_clocks(step(learner, samples))
    after = weights(learner.critic.parameters)

    restored = with_critic(load(), {"backbone": backbone})
    load_learner(path, restored, select())
    assert without_clocks(step(restored, samples)) == metrics
    assert restored.critic is not None and not moved(restored.critic.parameters, after)

    forgetful = with_critic(load(), {"backbone": backbone})
    load_learner(path, forgetful, select())
    assert forgetful.critic is not None
    forgetful.critic.optimizer.state.clear()
    step(forgetful, samples)
    assert moved(forgetful.critic.parameters, after)  # so the comparison above would see lost moments

    with pytest.raises(CheckpointError, match="critic"):
        load_learner(path, make_learner(load()), select())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_gradient_does_not_depend_on_micro_batches(backbone: str) -> None:
    found = []
    for budget in (10_000, 40):
        loaded = load()
        learner = with_critic(loaded, {"backbone": backbone}, micro_batch_tokens=budget)
        assert learner.critic is not None
        with torch.no_grad():
            learner.critic.head.weight.fill_(0.1)
        samples = assign_advantages(learner.score(episodes(loaded)), learner.algorithm)
        kept: dict[str, Tensor] = {}

        def keep(skip: bool, add: Any, learner: Learner = learner, kept: dict[str, Tensor] = kept) -> float:
            assert not skip and learner.critic is not None
            kept |= {n: p.grad.clone() for n, p in learner.critic.parameters.items() if p.grad is not None}
            return 0.0

        learner.critic.apply = keep  # type: ignore[method-assign]
        learner.step(samples)
        found.append(kept)
    assert found[0].keys() == found[1].keys() and "critic.head.weight" in found[0]
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=2e-4, atol=2e-6)


def test_a_value_that_is_not_finite_skips_the_critic_s_step_and_is_told() -> None:
    loaded = load()
    learner = with_critic(loaded)
    assert learner.critic is not None
    samples = assign_advantages(learner.score(episodes(loaded)), learner.algorithm)
    with torch.no_grad():
        learner.critic.head.bias.fill_(float("nan"))
    before = copy.deepcopy(weights(learner.critic.parameters))
    metrics = learner.step(samples)
    assert metrics["skipped_updates"] == 1 and np.isnan(metrics["critic/grad_norm"])
    assert moved(learner.critic.parameters, before) == {"critic.head.bias"}  # NaN is not equal to itself
    assert set(learner.skipped) == {sample.id for sample in samples}


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "rico_gae"},
        {"preset": "rico_grpo"},
        {"preset": "aico", "loss_mask": False},
        {"preset": "trico", "advantage_mask": False},
    ],
)
def test_observations_are_scored_where_a_mask_is_off(settings: dict[str, Any]) -> None:
    loaded = load()
    learner = with_critic(loaded, algorithm={**settings, "kl_coef": 0.01})
    made = learner.score(episodes(loaded))
    n = made[0].n_scored
    assert n > made[0].n_trained == 5
    metrics = step(learner, episodes(loaded))
    tokens = sum(s.n_trained if learner.algorithm.loss_mask else s.n_scored for s in made)
    assert metrics["tokens"] == tokens and metrics["skipped_updates"] == 0


def test_what_the_world_said_is_scored_under_the_whole_distribution() -> None:
    """Images too: their placeholders are forbidden to the policy alone."""
    loaded = load()
    learner = with_critic(loaded, algorithm={"preset": "rico_gae", "kl_coef": 0.01})
    made = trajectory(loaded, 0, (3, 2), [an_image(5)], later_images=[an_image(6)], rewards=(0.0, 1.0))
    (scored,) = learner.score(export([made], "concat", "sum", 1.0, "tiny"))
    logits = plain_logits(plain_model(tiny_folder()), loaded, [scored])[0].detach()
    usable = [i for i in range(loaded.policy.n_tokens) if i not in loaded.policy.special.placeholders]
    start = len(scored.segments[0])
    expected = []
    for at, (token, sampled) in enumerate(zip(scored.token_ids[start:], scored.sampled_mask, strict=True), start):
        row = logits[at - 1]
        expected.append(float(row[token] - (row[usable] if sampled else row).logsumexp(0)))
    assert any(token in loaded.policy.special.placeholders for token in scored.token_ids[start:])
    assert scored.scores.reference_N is not None and scored.scores.proximal_N is not None
    np.testing.assert_allclose(scored.scores.reference_N, expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(scored.scores.proximal_N, expected, rtol=0, atol=2e-5)
    assert step(learner, [scored])["skipped_updates"] == 0


def test_a_policy_without_estimator_of_values_has_no_critic() -> None:
    loaded = load()
    learner = make_learner(loaded)
    assert learner.critic is None
    assert not any(name.startswith("critic/") for name in learner.step(samples_of(loaded)))
