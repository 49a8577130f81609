"""Group relative policy optimisation, Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), outcome supervision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import over_samples
from npu_vlrl.algorithms.advantages.groups import centre, group_sum
from npu_vlrl.algorithms.component import Options

EPSILON = 1e-6


class GrpoOptions(Options):
    advantage_std: Literal["group", "batch"] = "group"
    """Spread that a group's advantages are divided by: the group's own, or the batch's."""


@over_samples(GrpoOptions)
def grpo(rewards: np.ndarray, groups: Sequence[str], advantage_std: Literal["group", "batch"] = "group") -> np.ndarray:
    """(R - mean of the group) / (std + 1e-6), float64 [S].

    The unbiased standard deviation is that of the rewards in the sample's group ("group"), or of all centred rewards of
    the batch ("batch", which does not blow up the small differences of an almost uniform group). Groups of one and
    groups of equal rewards get exactly 0. Raises ValueError for unequal lengths and for rewards that are not finite.
    """
    centred = centre(rewards, groups)
    values_S = centred.values_S
    if advantage_std == "batch":
        return values_S / (values_S.std(ddof=1) + EPSILON) if values_S.size > 1 else values_S
    squares_G = group_sum(values_S**2, centred.group_S, centred.size_G)
    std_G = np.sqrt(squares_G / np.maximum(centred.size_G - 1, 1))
    advantages_S: np.ndarray = values_S / (std_G[centred.group_S] + EPSILON)
    return advantages_S
