"""Equality of rewards: what differs by rounding only has no spread."""

from __future__ import annotations

from typing import Any

import numpy as np

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Rewards that are as close to each other are equal: a sum of a million terms is rounded by less."""


def equal(lowest: Any, highest: Any) -> Any:
    """Whether rewards between these differ by rounding at most, as sums of the same terms in another order do: by less
    than `RELATIVE` of the larger, or `ABSOLUTE`. Numbers or arrays.
    """
    return highest - lowest <= RELATIVE * np.maximum(np.abs(lowest), np.abs(highest)) + ABSOLUTE
