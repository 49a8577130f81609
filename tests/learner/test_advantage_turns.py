"""The estimators over turns and samples, against plain readings of their definitions and against numbers by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.algorithms.advantages.gigpo import gigpo
from npu_vlrl.algorithms.advantages.opo import opo
from npu_vlrl.algorithms.advantages.turn_grpo import turn_grpo
from npu_vlrl.algorithms.advantages.turns import Turns

few = settings(max_examples=40, deadline=None)
number = st.integers(-8, 8).map(lambda x: x / 4)  # sums of them are exact


@st.composite
def batches(draw: st.DrawFn) -> tuple[Turns, list[str]]:
    """1..3 groups of 1..4 episodes of 1..4 turns, and a state for each turn."""
    group: list[str] = []
    episode: list[int] = []
    index: list[int] = []
    rewards: list[float] = []
    outcomes: list[float] = []
    for g in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            earned = draw(st.lists(number, min_size=1, max_size=4))
            group += [f"g{g}"] * len(earned)
            episode += [episode[-1] + 1 if episode else 0] * len(earned)
            index += range(len(earned))
            rewards += earned
            outcomes += [sum(earned)] * len(earned)
    states = [draw(st.sampled_from("ab")) for _ in rewards]
    return Turns(np.array(group), np.array(episode), np.array(index), np.array(rewards), np.array(outcomes)), states


def returns(turns: Turns, discount: float) -> list[float]:
    total: list[float] = []
    for s in range(len(turns.rewards_K)):
        later = [t for t in range(s, len(turns.rewards_K)) if turns.episode_K[t] == turns.episode_K[s]]
        total.append(math.fsum(discount ** (t - s) * turns.rewards_K[t] for t in later))
    return total


def outcomes_of(turns: Turns, group: str) -> list[float]:
    found = {e: o for e, o, g in zip(turns.episode_K, turns.outcomes_K, turns.group_K, strict=True) if g == group}
    return list(found.values())


@few
@given(batches(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_gigpo(batch: tuple[Turns, list[str]], discount: float, omega: float) -> None:
    turns, states = batch
    back = returns(turns, discount)
    found = gigpo(turns, states, discount, omega)
    for s in range(len(states)):
        same = [
            b for b, g, x in zip(back, turns.group_K, states, strict=True) if (g, x) == (turns.group_K[s], states[s])
        ]
        expected = turns.outcomes_K[s] - statistics.fmean(outcomes_of(turns, turns.group_K[s]))
        expected += omega * (back[s] - statistics.fmean(same))
        assert found[s] == pytest.approx(expected, abs=1e-12)


def normalised(value: float, peers: list[float]) -> float:
    if len(peers) < 2 or min(peers) == max(peers):
        return 0.0
    return (value - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)


@few
@given(batches(), st.sampled_from([0.5, 1.0]))
def test_turn_grpo(batch: tuple[Turns, list[str]], discount: float) -> None:
    turns, _ = batch
    back = returns(turns, discount)
    found = turn_grpo(turns, discount)
    where = list(zip(turns.group_K, turns.index_K, strict=True))
    for s, place in enumerate(where):
        expected = normalised(back[s], [b for b, other in zip(back, where, strict=True) if other == place])
        expected += normalised(turns.outcomes_K[s], outcomes_of(turns, turns.group_K[s]))
        assert found[s] == pytest.approx(expected, abs=1e-9)


def test_a_state_that_was_seen_once_adds_nothing() -> None:
    turns = Turns(np.array(["g", "g"]), np.array([0, 1]), np.array([0, 0]), np.array([1.0, 0]), np.array([1.0, 0]))
    assert gigpo(turns, ["a", "b"], 1.0, 1.0).tolist() == [0.5, -0.5]
    assert gigpo(turns, ["a", "a"], 1.0, 1.0).tolist() == [1.0, -1.0]


def test_the_same_state_in_two_groups_is_two_anchors() -> None:
    turns = Turns(np.array(["g", "h"]), np.array([0, 1]), np.array([0, 0]), np.array([1.0, 0]), np.array([1.0, 0]))
    assert gigpo(turns, ["a", "a"], 1.0, 1.0).tolist() == [0, 0]


def test_opo_by_hand() -> None:
    # the baseline is (3 * 1 + 1 * 0) / 4
    assert opo(np.array([1.0, 0.0]), ["g", "g"], np.array([3, 1])).tolist() == [0.25, -0.75]
    assert opo(np.array([0.3, 0.3, 2.0]), ["g", "g", "h"], np.array([3, 1, 7])).tolist() == [0, 0, 0]
