"""Formulas compared by their values: identities hold, near misses do not, and what has no value is not decided."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.workflow.rewards.answers.functions import same_function

x, y = sympy.symbols("x y", real=True)
TINY = sympy.Rational(1, 10**25)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (sympy.sin(x) ** 2 + sympy.cos(x) ** 2, sympy.Integer(1), True),
        (sympy.sqrt(1 / x), 1 / sympy.sqrt(x), True),
        (sympy.Abs(x), x, False),
        (sympy.sqrt(x**2), sympy.Abs(x), True),
        ((x + y) ** 2, x**2 + 2 * x * y + y**2, True),
        (x - y, y - x, False),
        (x, y, False),
        (x * (1 + TINY), x, False),
        (sympy.pi * TINY, sympy.pi * TINY * 2, False),
        (sympy.sqrt(2) ** 2 * TINY, 2 * TINY, True),
        (x**100000000, x**100000001, False),
        (sympy.sin(1) ** 2 + sympy.cos(1) ** 2 - 1, sympy.Integer(0), None),
        (sympy.nan, sympy.nan, None),
        (sympy.zoo, sympy.zoo, None),
        (sympy.oo, sympy.oo, True),
        (sympy.oo, -sympy.oo, None),
        (sympy.Eq(x, 1), sympy.Eq(x, 1), None),
        (sympy.Matrix([1]), sympy.Matrix([1]), None),
    ],
)
def test_by_values(one: object, other: object, same: bool | None) -> None:
    assert same_function(one, other) is same


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=5), st.integers(0, 4), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_polynomials_are_equal_by_their_coefficients(coefficients: list[int], place: int, change: int) -> None:
    """Written by Horner's scheme and as a sum of powers; one coefficient changed makes another function."""
    powers = sum(c * x**i for i, c in enumerate(coefficients))
    horner = sympy.Integer(0)
    for c in reversed(coefficients):
        horner = horner * x + c
    other = powers + change * x ** min(place, len(coefficients) - 1)
    assert same_function(sympy.sympify(powers), horner) is True
    assert same_function(sympy.sympify(other), horner) is not True
