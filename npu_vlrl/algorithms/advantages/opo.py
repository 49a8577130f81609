"""On-policy RL with the optimal baseline, Hao et al. 2025 (arXiv 2505.23585)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import over_samples
from npu_vlrl.algorithms.advantages.groups import centre, group_sum


@over_samples(lengths=True)
def opo(rewards: np.ndarray, groups: Sequence[str], lengths: np.ndarray) -> np.ndarray:
    """R - Σ length · R / Σ length over the group, float64 [S]; `lengths` counts the trained tokens of each sample.

    Groups of equal rewards get exactly 0. Raises ValueError for unequal lengths and for rewards that are not finite.
    """
    centred = centre(rewards, groups)
    weighted_G = group_sum(centred.values_S * lengths, centred.group_S, centred.size_G)
    total_G = group_sum(np.asarray(lengths, dtype=np.float64), centred.group_S, centred.size_G)
    advantages_S: np.ndarray = centred.values_S - (weighted_G / np.maximum(total_G, 1))[centred.group_S]
    return advantages_S
