"""Decides by numerical values whether two formulas are the same number, or the same function of real variables.

math-verify's own comparison takes differences below 10^-15 for 0, so that 2^-99 would equal 2^-98, and compares
decimals to six places. Here values are compared relative to their size, at 40 digits and at points that no formula was
made for: two formulas that differ, differ almost everywhere (Schwartz 1980).
"""

from __future__ import annotations

import random
from typing import Any

import sympy

_DIGITS = 40
_TOLERANCE = sympy.Float(10, _DIGITS) ** -30
_POINTS = 8
_ENOUGH = 2
"""Number of points at which both formulas must be real numbers for a verdict."""


def same_function(gold: Any, answer: Any) -> bool | None:
    """Whether two formulas have equal values. None where values do not decide: for equations, sets, matrices, and
    formulas that cannot be computed at enough points.
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)) or gold.is_Matrix or answer.is_Matrix:
        return None
    if gold == answer and not gold.has(sympy.nan, sympy.zoo):
        return True
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    seen = 0
    for point in range(_POINTS if symbols else 1):
        values = {symbol: _coordinate(point, i) for i, symbol in enumerate(symbols)}
        one, other = _value(gold, values), _value(answer, values)
        if one is None or other is None or (symbols and not (one.is_real or other.is_real)):
            continue
        if abs(one - other) > _TOLERANCE * max(abs(one), abs(other)):
            return False
        seen += 1
    return True if seen >= (_ENOUGH if symbols else 1) else None


def _coordinate(point: int, symbol: int) -> sympy.Rational:
    """Coordinate up to 1 in one half of the points and up to 3 in the other; of both signs, unrelated to each other."""
    draw = random.Random(1000 * point + symbol)
    size = sympy.Rational(draw.randint(100, 990) if point % 4 < 2 else draw.randint(1000, 3000), 997)
    return size if point % 2 == 0 else -size


def _value(formula: sympy.Expr, values: dict[Any, Any]) -> Any:
    """Finite value of a formula, with all digits right; None where there is none, as for terms that cancel to 0."""
    try:  # the values are put in as decimals: x^100000000 of a fraction would never end
        value = formula.doit().evalf(_DIGITS, subs=values, strict=True)
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    finite = value.is_number and not value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)
    return value if finite and all(part.is_Number for part in value.as_real_imag()) else None
