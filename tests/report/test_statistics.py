"""Statistics against brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.report import statistics
from npu_vlrl.report.statistics import bootstrap_intervals, mcnemar_exact, pass_at_k, powers_of_two


@pytest.mark.parametrize("answers", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(answers: int) -> None:
    for right in range(answers + 1):
        for k in range(1, answers + 1):
            subsets = list(itertools.combinations([True] * right + [False] * (answers - right), k))
            share = Fraction(sum(map(any, subsets)), len(subsets))
            assert pass_at_k(right, answers, k) == pytest.approx(float(share), abs=1e-15)


@given(st.integers(1, 300), st.data())
def test_pass_at_k_grows_with_k_and_pass_at_1_is_the_mean(answers: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, answers))
    values = [pass_at_k(right, answers, k) for k in powers_of_two(answers)]
    assert values[0] == pytest.approx(right / answers)
    assert values == sorted(values) and values[0] >= 0 and values[-1] <= 1


def test_pass_at_k_is_unbiased() -> None:
    """The naive 1 - (1 - c/n)^k is not: the mean of both over all outcomes of 6 draws, with p = 0.3 and k = 2."""
    p, n, k = 0.3, 6, 2
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(w * pass_at_k(c, n, k) for c, w in enumerate(chances)) == pytest.approx(1 - (1 - p) ** k)
    naive = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chances))
    assert naive < 1 - (1 - p) ** k - 0.01


@pytest.mark.parametrize(("right", "answers", "k"), [(-1, 2, 1), (3, 2, 1), (1, 2, 0), (1, 2, 3)])
def test_pass_at_k_refuses_what_is_not_defined(right: int, answers: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {right} right among {answers}"):
        pass_at_k(right, answers, k)


def test_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 4, 9)] == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_bootstrap_against_all_resamples_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tasks can be drawn in 5^5 = 3125 ways; quantiles of their means are known exactly."""
    values = np.array([0.0, 0.1, 0.3, 0.6, 2.0])
    means = np.array([np.mean(drawn) for drawn in itertools.product(values, repeat=5)])
    exact = np.quantile(means, [0.025, 0.975])
    monkeypatch.setattr(statistics, "RESAMPLES", 20000)
    (found,) = bootstrap_intervals(values[:, None], seed=0)
    assert found == pytest.approx(exact, abs=0.03)
    (narrow,) = bootstrap_intervals(values[:, None], seed=0, level=0.5)
    assert narrow == pytest.approx(np.quantile(means, [0.25, 0.75]), abs=0.02)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    samples = [(draw.random((60, 1)) < 0.4).astype(float) for _ in range(40)]
    covered = sum(low <= 0.4 <= high for s in samples for low, high in bootstrap_intervals(s, seed=1))
    assert 33 <= covered <= 40


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(-2, 2), st.booleans()), min_size=1, max_size=30), st.integers(0, 99))
def test_bootstrap_properties(rows: list[tuple[float, bool]], seed: int) -> None:
    values = np.array(rows, dtype=np.float64)
    found = bootstrap_intervals(values, seed)
    assert found.shape == (2, 2) and found.dtype == np.float64
    assert np.array_equal(found, bootstrap_intervals(values, seed))
    assert np.array_equal(found[::-1], bootstrap_intervals(values[:, ::-1], seed))  # columns share their draws
    assert (found[:, 0] <= found[:, 1]).all()
    assert (found[:, 0] >= values.min(0) - 1e-12).all() and (found[:, 1] <= values.max(0) + 1e-12).all()
    shifted = bootstrap_intervals(values + 1.0, seed)
    assert shifted == pytest.approx(found + 1.0)


def test_bootstrap_needs_a_task() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        bootstrap_intervals(np.zeros((0, 1)), seed=0)


@pytest.mark.parametrize("won", range(6))
@pytest.mark.parametrize("lost", range(6))
def test_mcnemar_by_counting_all_signs(won: int, lost: int) -> None:
    """Each change goes either way with the same chance: as many or more on one side as were seen."""
    splits = [sum(signs) for signs in itertools.product((0, 1), repeat=won + lost)]
    middle = (won + lost) / 2
    rarer = sum(abs(split - middle) >= abs(won - middle) for split in splits)
    assert mcnemar_exact(won, lost) == pytest.approx(rarer / len(splits))
    assert mcnemar_exact(won, lost) == mcnemar_exact(lost, won)


def test_mcnemar_of_known_values_and_many_changes() -> None:
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(1, 9) == pytest.approx(2 * 11 / 1024)
    assert mcnemar_exact(2000, 2000) == 1.0
    assert 0 < mcnemar_exact(900, 1100) < 1e-4
