"""The check that engine and learner agree looks at tokens of the learner's own weights alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npu_vlrl.learner.trainer import Learner, LearnerError
from npu_vlrl.types import Sample
from tests.support.learning import load, make_learner, samples_of, with_advantage
from tests.support.scoring import learner_logprobs

torch.set_num_threads(1)

MOST = 1e-3


def told(learner: Learner, stale: float, versions: tuple[int, int]) -> list[Sample]:
    """Samples whose logprobs are right, but for the first token of each trained segment: that is off by `stale`.

    The first token is of the first version, the others of the second.
    """
    samples = samples_of(loaded := load())
    right = learner_logprobs(learner.policy, learner.vision, samples)
    made = []
    for sample in samples:
        values = right[sample.id].tolist()
        segments = list(sample.segments)
        for i in sample.trained:
            n = len(segments[i])
            own, values = values[:n], values[n:]
            segments[i] = replace(
                segments[i],
                special=loaded.policy.special,
                logprobs=(own[0] - stale, *own[1:]),
                weight_versions=(versions[0], *[versions[1]] * (n - 1)),
            )
        made.append(replace(sample, segments=tuple(segments)))
    return made


def learner() -> Learner:
    return make_learner(load(), {"max_logprob_gap": MOST})


def test_tokens_of_other_weights_may_differ() -> None:
    metrics = learner().step(told(learner(), stale=0.3, versions=(6, 7)), version=7)
    assert metrics["logprob_gap"] < 1e-5
    # 32 trained tokens in 8 turns, whose first tokens are of version 6
    assert (metrics["gap_tokens"], metrics["gap_max_tokens"], metrics["logprob_gap_tokens"]) == (32, 24, 24)
    assert metrics["gap"] > 0.3 / 10, "the mean is over all tokens"


@pytest.mark.parametrize("version", [6, None])
def test_tokens_of_its_own_weights_may_not(version: int | None) -> None:
    with pytest.raises(LearnerError, match="differs by 0.3"):
        learner().step(told(learner(), stale=0.3, versions=(6, 7)), version=version)


def test_all_may_be_stale_and_then_no_gap_is_reported() -> None:
    metrics = learner().step(told(learner(), stale=0.3, versions=(6, 6)), version=7)
    assert "logprob_gap" not in metrics and "gap_max" not in metrics
    assert metrics["logprob_gap_tokens"] == 0 and metrics["gap"] == pytest.approx(0.3 * 8 / 32, abs=1e-5)


@pytest.mark.parametrize("version", [7, None])
def test_what_nobody_sampled_is_not_compared(version: int | None) -> None:
    """The learner knows observations by its own word alone, which it would agree with."""
    one = make_learner(load(), {"max_logprob_gap": MOST, "loss_mask": False})

    def scored(stale: float) -> list[Sample]:
        return [with_advantage(sample, 1.0) for sample in one.score(told(one, stale, versions=(7, 7)))]

    metrics = one.step(scored(0.0), version=version)
    assert metrics["tokens"] > 32  # observations are in the loss
    assert (metrics["gap_tokens"], metrics["logprob_gap_tokens"]) == (32, 32)
    assert one.step(scored(8e-4), version=version)["gap"] > 0.9 * 8e-4 * 8 / 32  # a mean over those 32


def test_the_update_is_the_same() -> None:
    """Only the check looks at versions."""
    steps = []
    for version in (7, None):
        one = learner()
        metrics = one.step(told(one, stale=0.0, versions=(6, 7)), version=version)
        steps.append((metrics["pg_loss"], metrics["grad_norm"], one.policy.head_weight.detach().clone()))
    assert steps[0][:2] == steps[1][:2] and torch.equal(steps[0][2], steps[1][2])
