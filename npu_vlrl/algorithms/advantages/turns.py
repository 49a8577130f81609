"""Arrays of the estimators over turns. K counts the turns of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from npu_vlrl.algorithms.advantages.tokens import backward_sums, changes
from npu_vlrl.algorithms.component import Options
from npu_vlrl.common.fields import Share


class TurnDiscount(Options):
    turn_discount: Share = 0.95
    """γ from turn to turn in the estimate; `workflow.turn_discount` is that of the episode's reward."""


@dataclass(frozen=True)
class Turns:
    """The turns of a batch: the turns of one episode are adjacent, in order."""

    group_K: np.ndarray
    """str: the group of the turn's episode."""
    episode_K: np.ndarray
    """int"""
    index_K: np.ndarray
    """int: index of the turn in its episode, 0 for the first."""
    rewards_K: np.ndarray
    """float64"""
    outcomes_K: np.ndarray
    """float64: the reward of the turn's whole episode, the same on all its turns."""

    def returns_to_go(self, discount: float) -> np.ndarray:
        """G_k = r_k + discount · G_(k+1), float64 [K]."""
        return backward_sums(self.rewards_K, self.episode_K, discount)

    def of_episodes(self, estimator: Callable[[np.ndarray, Sequence[str]], np.ndarray]) -> np.ndarray:
        """Values of an estimator over the episodes' outcomes, each episode counted once; on every turn, [K]."""
        first = np.ones(len(self.episode_K), dtype=bool)
        first[1:] = changes(self.episode_K)
        found_K: np.ndarray = estimator(self.outcomes_K[first], self.group_K[first].tolist())[first.cumsum() - 1]
        return found_K
