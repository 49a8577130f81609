"""From segments to the arrays of the estimators and back, by hand: two turns, with an observation between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from npu_vlrl.algorithms.advantages.batch import AdvantageBatch
from npu_vlrl.algorithms.selection import top_variance_groups
from npu_vlrl.config import AlgorithmConfig
from npu_vlrl.types import Sample, Scores, Segment, SegmentKind, SpecialTokens, StopReason
from tests.support.learning import assign_advantages

SPECIAL = SpecialTokens((9,))


def action(n: int, reward: float, stop: StopReason = StopReason.END_OF_TURN) -> Segment:
    logprobs = tuple(-0.5 * (i + 1) for i in range(n))
    return Segment(SegmentKind.ACTION, (5,) * n, SPECIAL, (), logprobs, (0,) * n, stop, reward)


PROMPT = Segment(SegmentKind.PROMPT, (1, 2), SPECIAL)
SEEN = Segment(SegmentKind.OBSERVATION, (3, 4), SPECIAL)
FIRST, SECOND = action(3, 0.5), action(2, 2.0)
CONCAT = Sample("g/0", "g", (PROMPT, FIRST, SEEN, SECOND), (1, 3), 2.5, 2.5, "g/0", states=("a", "b"))
APART = [
    Sample("g/0/0", "g", (PROMPT, FIRST), (1,), 2.5, 2.5, "g/0", 0, ("a",)),
    Sample("g/0/1", "g", (PROMPT, FIRST, SEEN, SECOND), (3,), 2.0, 2.5, "g/0", 1, ("b",)),
]
OTHER = Sample("g/1", "g", (PROMPT, action(1, 1.0)), (1,), 1.0, 1.0, "g/1", states=("a",))
WIDE = replace(CONCAT, with_observations=True)


def batch(*samples: Sample, earned: list[float] | None = None) -> AdvantageBatch:
    count = sum(sample.n_scored for sample in samples)
    return AdvantageBatch(samples, np.array(earned if earned is not None else [0.0] * count, dtype=np.float64))


@pytest.mark.parametrize("samples", [[CONCAT, OTHER], [*APART, OTHER]])
def test_tokens_of_both_export_styles(samples: list[Sample]) -> None:
    tokens = batch(*samples).tokens(values=False, turn_rewards=True)
    assert tokens.episode_N.tolist() == [0, 0, 0, 0, 0, 1]
    assert tokens.turn_N.tolist() == [0, 0, 0, 1, 1, 0]
    assert tokens.sampled_N.all() and not tokens.values_N.any()
    assert tokens.rewards_N.tolist() == [0, 0, 0.5, 0, 2, 1]
    outcome = batch(*samples).tokens(values=False, turn_rewards=False)
    assert outcome.rewards_N.tolist() == [0, 0, 0, 0, 2.5, 1]


def test_observations_belong_to_the_turn_after_them() -> None:
    assert WIDE.scored == (1, 2, 3) and WIDE.n_scored == 7 and WIDE.n_trained == 5
    assert np.isnan(WIDE.behaviour_logprobs).tolist() == [False] * 3 + [True] * 2 + [False] * 2
    values = Scores(values_N=np.arange(7, dtype=np.float32))
    tokens = batch(replace(WIDE, scores=values), earned=[0, -1, 0, 0, 0, 0, -2]).tokens(True, turn_rewards=True)
    assert tokens.turn_N.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert tokens.sampled_N.tolist() == [True, True, True, False, False, True, True]
    assert tokens.rewards_N.tolist() == [0, -1, 0.5, 0, 0, 0, 0] and tokens.values_N.tolist() == list(range(7))


def test_turns_and_what_tokens_earned_by_themselves() -> None:
    turns = batch(CONCAT, OTHER, earned=[0, -1, 0, 0, -2, 0]).turns()
    assert turns.group_K.tolist() == ["g"] * 3 and turns.episode_K.tolist() == [0, 0, 1]
    assert turns.index_K.tolist() == [0, 1, 0]
    assert turns.rewards_K.tolist() == [-0.5, 0.0, 1.0]
    assert turns.outcomes_K.tolist() == [-0.5, -0.5, 1.0]
    assert batch(CONCAT, OTHER, earned=[0, -1, 0, 0, -2, 0]).rewards().tolist() == [-0.5, 1.0]
    assert batch(*APART).turns().index_K.tolist() == [0, 1]
    assert batch(WIDE).on_turns(np.array([1.0, 2.0])).tolist() == [1, 1, 1, 2, 2, 2, 2]


def assigned(samples: list[Sample], **settings: Any) -> list[list[float]]:
    made = assign_advantages(samples, AlgorithmConfig(**settings))
    assert all(sample.credit is not None and len(sample.credit.advantages_N) == sample.n_scored for sample in made)
    return [sample.credit.advantages_N.tolist() for sample in made if sample.credit is not None]


def test_turn_credit_by_hand() -> None:
    settings: dict[str, Any] = {"advantage": "gigpo", "turn_discount": 0.5, "state_weight": 2.0, "kl_coef": 0.0}
    # episodes: 2.5 and 1, mean 1.75; returns to go 1.5, 2, 1; those of state a are 1.5 and 1, mean 1.25; b stands alone
    assert assigned([CONCAT, OTHER], **settings) == [[1.25] * 3 + [0.75] * 2, [-1.25]]
    assert assigned([*APART, OTHER], **settings) == [[1.25] * 3, [0.75] * 2, [-1.25]]


def test_states_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="sample g/1: its environment does not say in which state a turn began"):
        assigned([CONCAT, replace(OTHER, states=(None,))], preset="gigpo", kl_coef=0.0)


def test_the_mean_advantage_of_each_turn() -> None:
    made = assign_advantages([WIDE, OTHER], AlgorithmConfig(preset="rico_grpo", kl_coef=0.0))
    half = 0.75 / (1.5 / 2**0.5 + 1e-6)
    assert made[0].turn_advantages == pytest.approx([half, half]) and made[1].turn_advantages == pytest.approx([-half])
    assert CONCAT.turn_advantages == []


def test_a_kl_penalty_in_the_reward() -> None:
    reference = np.array([-0.5, -2.0, -1.5, -0.5, -1.0], np.float32)
    scored = replace(CONCAT, scores=Scores(reference_N=reference))
    settings: dict[str, Any] = {"advantage": "reinforce_pp", "kl_coef": 0.5, "kl_kind": "k1", "kl_in": "reward"}
    made = assign_advantages([scored], AlgorithmConfig(**settings, token_discount=1.0))
    assert made[0].credit is not None
    # the behaviour's log-probability of token 1 is 1 above the reference's: it costs 0.5, and so does nothing else
    assert made[0].credit.returns_N.tolist() == [2.0, 2.0, 2.5, 2.0, 2.0]
    grouped = assigned(
        [scored, replace(OTHER, scores=Scores(reference_N=np.array([-0.5], np.float32)))],
        **settings | {"advantage": "dr_grpo"},
    )
    assert grouped == [[0.5] * 5, [-0.5]]


def test_a_last_turn_that_was_cut_still_earns_its_reward() -> None:
    cut = replace(CONCAT, segments=(PROMPT, FIRST, SEEN, action(2, -1.0, StopReason.TURN_BUDGET)))
    scored = replace(cut, scores=Scores(values_N=np.zeros(5, np.float32), reference_N=None))
    for name in ("gae", "masked_gae", "bi_level_gae", "turn_wise_gae"):
        settings = {"advantage": name, "kl_coef": 0.0, "preset": "trico"}
        (made,) = assign_advantages([scored], AlgorithmConfig(**settings))  # type: ignore[arg-type]
        assert made.credit is not None and made.credit.returns_N[-1] == -1.0


def test_a_sample_without_any_token_is_defined() -> None:
    empty = Sample("h/0", "h", (PROMPT,), (), 0.0, 0.0, "h/0")
    for name in ("grpo", "opo", "rloo", "turn_grpo"):
        settings = {"advantage": name, "kl_coef": 0.0}
        values = assigned([CONCAT, OTHER, empty], **settings)
        assert values[2] == [] and np.isfinite(values[0] + values[1]).all()


def test_the_groups_that_vary_most_are_kept() -> None:
    def group(name: str, *outcomes: float) -> list[Sample]:
        return [
            replace(OTHER, id=f"{name}/{i}", group=name, episode=f"{name}/{i}", outcome=value)
            for i, value in enumerate(outcomes)
        ]

    samples = [*group("a", 0, 0), *group("b", 0, 2), *group("c", 0, 1), *group("d", 1, 0)]
    assert {s.group for s in top_variance_groups(samples, 0.25)} == {"b"}
    assert [s.id for s in top_variance_groups(samples, 0.5)] == ["b/0", "b/1", "c/0", "c/1"]
    assert {s.group for s in top_variance_groups(samples, 0.51)} == {"b", "c", "d"}
    assert top_variance_groups(samples, 1.0) == samples
    assert {s.group for s in top_variance_groups(samples, 0.01)} == {"b"}


def test_rounding_is_no_spread() -> None:
    """0.1 + 0.2 and 0.3 are one outcome. Groups that differ by rounding alone tie, and the earlier one is kept."""
    rows = [("a", 0.3), ("a", 0.1 + 0.2), ("b", 0.0), ("b", 0.3), ("c", 0.0), ("c", 0.1 + 0.2)]
    samples = [
        replace(OTHER, id=f"{group}/{i}", group=group, episode=f"{group}/{i}", outcome=value)
        for i, (group, value) in enumerate(rows)
    ]
    assert {s.group for s in top_variance_groups(samples, 0.3)} == {"b"}
    assert {s.group for s in top_variance_groups(samples, 0.6)} == {"b", "c"}


def test_samples_of_an_episode_stand_together() -> None:
    with pytest.raises(AssertionError, match="do not stand together"):
        assigned([APART[0], OTHER, APART[1]], advantage="turn_grpo", kl_coef=0.0)
