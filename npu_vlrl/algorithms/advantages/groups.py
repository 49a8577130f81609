"""Shared parts of the group-relative estimators. S counts samples, G groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npu_vlrl.algorithms.equality import equal

LARGEST_REWARD = 1e100
"""Limit of an absolute reward, whose square is still a finite float64."""


@dataclass(frozen=True)
class Centred:
    """Rewards minus the mean of their group, and the group of each."""

    values_S: np.ndarray
    """float64; exactly 0 throughout a group whose rewards are `equal`, despite rounding."""
    group_S: np.ndarray
    """int: index of each sample's group."""
    size_G: np.ndarray
    """int: members of each group."""


def centre(rewards: np.ndarray, groups: Sequence[str]) -> Centred:
    """Subtracts from each reward the mean of its group; the rows may stand in any order.

    Raises ValueError when the two disagree in length, or a reward is NaN, infinite or larger than `LARGEST_REWARD`.
    """
    rewards_S = np.asarray(rewards, dtype=np.float64)
    if rewards_S.shape != (len(groups),):
        raise ValueError(f"advantages: {len(groups)} groups were named for rewards of shape {list(rewards_S.shape)}")
    unusable = np.flatnonzero(~(np.abs(rewards_S) <= LARGEST_REWARD))
    if unusable.size:
        index = int(unusable[0])
        raise ValueError(
            f"advantages: reward {index} (group {groups[index]!r}) is {rewards_S[index]}; rewards must be finite. "
            "Look at the reward function that made it."
        )
    names_G, group_S, size_G = np.unique(np.asarray(groups, dtype=str), return_inverse=True, return_counts=True)
    lowest_G, highest_G = np.full(len(names_G), np.inf), np.full(len(names_G), -np.inf)
    np.minimum.at(lowest_G, group_S, rewards_S)
    np.maximum.at(highest_G, group_S, rewards_S)
    mean_G = group_sum(rewards_S, group_S, size_G) / size_G
    values_S = np.where(equal(lowest_G, highest_G)[group_S], 0.0, rewards_S - mean_G[group_S])
    return Centred(values_S, group_S, size_G)


def group_sum(values_S: np.ndarray, group_S: np.ndarray, size_G: np.ndarray) -> np.ndarray:
    """Sum of the values of each group, [G]."""
    return np.bincount(group_S, weights=values_S, minlength=len(size_G))
