"""The best of a group against all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import over_samples


@over_samples()
def best_of(rewards: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """1 for a sample with the largest reward of its group, -1 for the others, 0 where all are equal; float64 [S]."""
    names = np.array(groups)
    best_S = np.array([rewards[names == name].max() for name in groups])
    worst_S = np.array([rewards[names == name].min() for name in groups])
    return np.where(best_S == worst_S, 0.0, np.where(rewards == best_S, 1.0, -1.0))
