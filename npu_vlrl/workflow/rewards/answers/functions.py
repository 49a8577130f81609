"""Whether two formulas are the same number or the same function of real variables, by their values.

math-verify's own comparison takes differences below 10^-15 for 0, so that 2^-99 would equal 2^-98, and compares
decimals to six places. Here values are compared relative to their size, at 40 digits and at points that no formula was
made for: two formulas that differ, differ almost everywhere (Schwartz 1980).
"""

from __future__ import annotations

from typing import Any

import sympy

_DIGITS = 40
_TOLERANCE = sympy.Float(10, _DIGITS) ** -30
_POINTS = 6
_ENOUGH = 2
"""Points at which both must be real numbers for a verdict."""


def same_function(gold: Any, answer: Any) -> bool | None:
    """None where values do not decide: for equations, sets, matrices, and what cannot be computed at enough points."""
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)) or gold.is_Matrix or answer.is_Matrix:
        return None
    if gold == answer and not gold.has(sympy.nan, sympy.zoo):
        return True
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    seen = 0
    for point in range(_POINTS if symbols else 1):
        values = {symbol: _coordinate(point, i) for i, symbol in enumerate(symbols)}
        one, other = _value(gold, values), _value(answer, values)
        if one is None or other is None:
            return None
        if not (_finite(one) and _finite(other)):
            continue
        if symbols and not (one.is_real or other.is_real):
            continue
        equal = _close(one, other)
        if equal is None:
            return None
        if not equal:
            return False
        seen += 1
    return True if seen >= min(_ENOUGH, _POINTS if symbols else 1) else None


def _coordinate(point: int, symbol: int) -> sympy.Rational:
    """Positive at even points and negative at odd ones, different for each variable."""
    size = sympy.Rational(7 + 13 * point + 5 * symbol, 11 + 3 * symbol + point)
    return size if point % 2 == 0 else -size


def _value(formula: sympy.Expr, values: dict[Any, Any]) -> Any:
    try:
        value = formula.doit().evalf(_DIGITS, subs=values)  # not with exact values: x^100000000 would never end
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    return value if value.is_number and (value.is_Float or value.is_Integer or len(value.as_real_imag()) == 2) else None


def _finite(value: Any) -> bool:
    return not value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)


def _close(one: Any, other: Any) -> bool | None:
    """Relative to the larger; None where both may be 0, which digits cannot tell."""
    size = max(abs(one), abs(other))
    if size == 0:
        return True
    if min(abs(one), abs(other)) == 0 and size < sympy.Float(10) ** -_DIGITS:
        return None
    return bool(abs(one - other) <= _TOLERANCE * size)
