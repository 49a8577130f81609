"""GRPO with credit for each turn: turns are compared with the same turn of the group's other episodes."""

from __future__ import annotations

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import over_turns
from npu_vlrl.algorithms.advantages.grpo import grpo
from npu_vlrl.algorithms.advantages.turns import TurnDiscount, Turns


@over_turns(TurnDiscount)
def turn_grpo(turns: Turns, turn_discount: float) -> np.ndarray:
    """Group-normalised return-to-go among the turns of equal index, plus the group-normalised outcome; float64 [K].

    Both are (x - mean) / (std + 1e-6), and 0 for a group of one or of equal values.
    """
    peers = [f"{index}/{group}" for group, index in zip(turns.group_K, turns.index_K, strict=True)]
    advantages_K: np.ndarray = grpo(turns.returns_to_go(turn_discount), peers) + turns.of_episodes(grpo)
    return advantages_K
