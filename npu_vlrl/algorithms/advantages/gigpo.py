"""Group-in-group policy optimisation, Feng et al. 2025 (arXiv 2505.10978)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from npu_vlrl.algorithms.advantages.dr_grpo import dr_grpo
from npu_vlrl.algorithms.advantages.estimator import over_turns
from npu_vlrl.algorithms.advantages.groups import centre
from npu_vlrl.algorithms.advantages.turns import TurnDiscount, Turns
from npu_vlrl.common.fields import NonNegative


class GigpoOptions(TurnDiscount):
    state_weight: NonNegative = 1.0
    """Weight of GiGPO's comparison of turns that began in the same state."""


@over_turns(GigpoOptions, states=True)
def gigpo(turns: Turns, states: Sequence[Hashable], turn_discount: float, state_weight: float) -> np.ndarray:
    """(R_i - mean of the group) + w · (G_k - mean over the group's turns that began in the same state), [K].

    w is `state_weight`, `states` holds the environment's `state_key` before each turn, and G_k is the discounted return
    from the turn on. A state that was seen once adds nothing.
    """
    anchors = list(zip(turns.group_K.tolist(), states, strict=True))
    numbers = {anchor: str(number) for number, anchor in enumerate(dict.fromkeys(anchors))}
    steps = centre(turns.returns_to_go(turn_discount), [numbers[anchor] for anchor in anchors]).values_S
    return turns.of_episodes(dr_grpo) + state_weight * steps
