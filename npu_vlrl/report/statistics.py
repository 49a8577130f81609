"""Statistics of evaluations, in float64: pass@k, percentile bootstrap over tasks, McNemar's exact test."""

from __future__ import annotations

import math

import numpy as np

RESAMPLES = 2000
"""Number of resamples of a bootstrap; an end of a 95 % interval is then known to about 0.3 % of the samples."""

AT_ONCE = 2**20
"""Number of random numbers drawn at once: 8 MiB."""


def pass_at_k(right: int, answers: int, k: int) -> float:
    """Probability that at least one of `k` answers is right, drawn without replacement from `answers` of which `right`
    are: 1 - C(answers - right, k) / C(answers, k), the unbiased estimator of Chen et al. (arXiv 2107.03374).

    Raises ValueError unless 0 <= right <= answers and 1 <= k <= answers.
    """
    if not (0 <= right <= answers and 1 <= k <= answers):
        raise ValueError(f"pass@{k} of {right} right among {answers} answers is not defined")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def powers_of_two(most: int) -> list[int]:
    """Powers of two: 1, 2, 4, … up to `most`."""
    return [2**n for n in range(most.bit_length())]


def bootstrap_intervals(values: np.ndarray, seed: int, level: float = 0.95) -> np.ndarray:
    """Percentile bootstrap intervals of column means, float64 [columns, 2].

    `values`, float64 [tasks, columns], holds one number of each kind a task. Tasks are resampled, never answers: the
    answers of a task depend on each other. All columns are resampled together, so the order of columns changes nothing.
    Raises ValueError when there is no task.
    """
    if not len(values):
        raise ValueError("a bootstrap needs at least one task")
    draw, n = np.random.default_rng(seed), len(values)
    many = max(1, AT_ONCE // values.size)
    sizes = [min(many, RESAMPLES - done) for done in range(0, RESAMPLES, many)]
    means = np.concatenate([values[draw.integers(n, size=(size, n))].mean(1) for size in sizes])
    intervals: np.ndarray = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0).T
    return intervals


def mcnemar_exact(won: int, lost: int) -> float:
    """Two-sided p of McNemar's exact test: the probability of this or a rarer split of won + lost equally likely
    changes.

    No change at all gives 1.
    """
    changes = won + lost
    tail = sum(math.comb(changes, i) for i in range(min(won, lost) + 1))
    splits: int = 2**changes
    return min(1.0, 2 * tail / splits)
