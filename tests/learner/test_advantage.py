"""Advantage estimators against the textbook formula, one group at a time, with Python's statistics."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.algorithms.advantages.dr_grpo import dr_grpo
from npu_vlrl.algorithms.advantages.grpo import grpo
from npu_vlrl.algorithms.advantages.rloo import rloo

Estimator = Callable[[np.ndarray, Sequence[str]], np.ndarray]
BATCH = partial(grpo, advantage_std="batch")
ALL: dict[str, Estimator] = {"grpo": grpo, "grpo-batch": BATCH, "dr_grpo": dr_grpo, "rloo": rloo}
every_estimator = pytest.mark.parametrize("estimator", ALL.values(), ids=ALL.keys())

REWARDS = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -1.0]), st.floats(-1e6, 1e6))
ROWS = st.lists(st.tuples(st.sampled_from("abcd"), REWARDS), min_size=1, max_size=16)


def others(rows: list[tuple[str, float]], index: int, with_self: bool) -> list[float]:
    return [r for i, (g, r) in enumerate(rows) if g == rows[index][0] and (with_self or i != index)]


def rounding(rewards: Sequence[float]) -> float:
    """What the rounding of a mean may become when it is divided by the smallest std plus 1e-6."""
    return 4 * float(np.finfo(np.float64).eps) * (max(map(abs, rewards)) + 1) / 1e-6


def by_hand(name: str, rows: list[tuple[str, float]]) -> list[float]:
    centred = [r - statistics.fmean(others(rows, i, True)) for i, (_, r) in enumerate(rows)]
    result = []
    for i, (_, reward) in enumerate(rows):
        group = others(rows, i, True)
        if len(set(group)) == 1:
            result.append(0.0)
        elif name == "grpo":
            result.append(centred[i] / (statistics.stdev(group) + 1e-6))
        elif name == "grpo-batch":
            result.append(centred[i] / (statistics.stdev(centred) + 1e-6))
        elif name == "rloo":
            result.append(reward - statistics.fmean(others(rows, i, False)))
        else:
            result.append(centred[i])
    return result


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_equals_the_formula(name: str, rows: list[tuple[str, float]]) -> None:
    groups, rewards = zip(*rows, strict=True)
    found = ALL[name](np.array(rewards), groups)
    np.testing.assert_allclose(found, by_hand(name, rows), rtol=1e-6, atol=rounding(rewards))
    assert np.isfinite(found).all() and found.dtype == np.float64


@every_estimator
@settings(max_examples=25, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_the_order_of_rows_does_not_matter(estimator: Estimator, rows: list[tuple[str, float]], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    groups, rewards = zip(*rows, strict=True)
    straight = estimator(np.array(rewards), groups)
    shuffled = estimator(np.array(rewards)[order], [groups[i] for i in order])
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6, atol=rounding(rewards))


def test_by_hand() -> None:
    rewards, groups = np.array([1.0, 5.0, 0.0, 3.0, 0.0]), ["x", "y", "x", "y", "x"]
    third = 1 / 3
    assert dr_grpo(rewards, groups).tolist() == pytest.approx([2 * third, 1, -third, -1, -third])
    assert rloo(rewards, groups).tolist() == pytest.approx([1, 2, -0.5, -2, -0.5])
    # std of (1, 0, 0) is sqrt(1/3); std of (5, 3) is sqrt(2)
    expected = [2 * third * 3**0.5, 2**-0.5, -third * 3**0.5, -(2**-0.5), -third * 3**0.5]
    assert grpo(rewards, groups).tolist() == pytest.approx(expected, abs=1e-5)
    # centred: 2/3, 1, -1/3, -1, -1/3: mean 0, squares 4/9 + 1 + 1/9 + 1 + 1/9 = 8/3, over 4
    std = (8 / 3 / 4) ** 0.5
    expected = [x / std for x in (2 * third, 1, -third, -1, -third)]
    assert BATCH(rewards, groups).tolist() == pytest.approx(expected, abs=1e-5)


def test_a_group_is_a_group_by_name() -> None:
    """Perturbation: with one row moved to the other group, its own group's advantages change."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert dr_grpo(rewards, ["a", "a", "b", "b"]).tolist() != dr_grpo(rewards, ["a", "a", "b", "a"]).tolist()


@every_estimator
def test_no_spread_is_exactly_zero(estimator: Estimator) -> None:
    """0.1 + 0.1 + 0.1 is not 3 · 0.1: a naive mean leaves a residue, which a std would blow up."""
    assert np.mean([0.1] * 3) != 0.1
    rewards = np.array([0.1, 0.1, 0.1, 7.0, 0.3])
    assert estimator(rewards, ["a", "a", "a", "alone", "single"]).tolist() == [0.0] * 5


@every_estimator
def test_rounding_is_no_spread(estimator: Estimator) -> None:
    rewards = [0.1 + 0.2, 0.3, 0.1 + 0.2 - 0.3, 0.0, 0.0, 1.0]
    values = estimator(np.array(rewards), ["a", "a", "b", "b", "c", "c"])
    assert values[:4].tolist() == [0.0] * 4 and values[4] < 0 < values[5]


@every_estimator
def test_equal_groups_beside_an_unequal_one(estimator: Estimator) -> None:
    found = estimator(np.array([0.1, 0.1, 0.1, 0.0, 1.0]), list("aaabb"))
    assert found[:3].tolist() == [0.0] * 3
    assert found[4] > 0 and found[3] == -found[4]


@every_estimator
def test_float32_lists_and_nothing(estimator: Estimator) -> None:
    found = estimator(np.array([1, 0], np.float32), ["a", "a"])
    assert found.dtype == np.float64 and found[0] > 0
    assert estimator(np.zeros(0), []).tolist() == []


@every_estimator
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
def test_unusable_rewards_are_named(estimator: Estimator, bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward 2 \(group 'geo/7'\) is .*must be finite"):
        estimator(np.array([0.0, 1.0, bad]), ["geo/6", "geo/6", "geo/7"])


@every_estimator
def test_lengths_must_agree(estimator: Estimator) -> None:
    with pytest.raises(ValueError, match=r"2 groups were named for rewards of shape \[3\]"):
        estimator(np.zeros(3), ["a", "b"])


def test_the_largest_rewards_stay_finite() -> None:
    for estimator in ALL.values():
        assert np.isfinite(estimator(np.array([1e100, -1e100, 0.0]), list("aaa"))).all()
