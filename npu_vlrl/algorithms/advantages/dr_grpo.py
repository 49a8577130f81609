"""GRPO without its standard deviation, Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783). Its loss divides by a constant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import over_samples
from npu_vlrl.algorithms.advantages.groups import centre


@over_samples()
def dr_grpo(rewards: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """R - mean of the group, float64 [S].

    Groups of one and groups of equal rewards get exactly 0. Raises ValueError for unequal lengths and for rewards that
    are not finite.
    """
    return centre(rewards, groups).values_S
