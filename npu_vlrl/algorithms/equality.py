"""Equality of rewards: values that differ by rounding only have no spread."""

from __future__ import annotations

from typing import Any

import numpy as np

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Tolerances: rewards that are this close are equal. The rounding of a sum of a million terms is smaller."""


def equal(lowest: Any, highest: Any) -> Any:
    """Whether rewards between `lowest` and `highest` differ by rounding at most, as sums of the same terms in another
    order do: by less than `RELATIVE` of the larger, or `ABSOLUTE`. Takes numbers or arrays.
    """
    return highest - lowest <= RELATIVE * np.maximum(np.abs(lowest), np.abs(highest)) + ABSOLUTE
