"""REINFORCE with a leave-one-out baseline, Ahmadian et al. 2024 (arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import over_samples
from npu_vlrl.algorithms.advantages.groups import centre


@over_samples()
def rloo(rewards: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """R - mean of the *other* members of the group, float64 [S]; computed as n / (n - 1) · (R - mean of the group).

    Groups of one and groups of equal rewards get exactly 0. Raises ValueError for unequal lengths and for rewards that
    are not finite.
    """
    centred = centre(rewards, groups)
    factor_G = centred.size_G / np.maximum(centred.size_G - 1, 1)
    advantages_S: np.ndarray = centred.values_S * factor_G[centred.group_S]
    return advantages_S
