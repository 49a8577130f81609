"""Compares two readings: words by their letters, numbers by their exact values, groups by their elements."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from npu_vlrl.workflow.rewards.answers.normalise import without_fonts
from npu_vlrl.workflow.rewards.answers.reading import letters, read
from npu_vlrl.workflow.rewards.answers.types import Ambiguous, Formula, Group, Labelled, Number, Option, Reading, Text
from npu_vlrl.workflow.rewards.answers.units import DEGREE, PERCENT, RADIAN, Meaning, Unit

Formulas = Callable[[Formula, Formula], bool]
"""Function that decides whether an answer's formula equals a gold's mathematically, whatever their units."""


_PRODUCT = re.compile(r"\\cdot|\\times|\*")


def same(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    """Whether `answer` is right where `gold` is. An ambiguous answer needs only one right reading.

    A unit or the name of a variable that one side leaves out is no difference (`x = 5` and `5`).
    """
    if isinstance(answer, Ambiguous):
        return any(same(gold, option, formulas) for option in answer.options)
    if isinstance(gold, Ambiguous):
        return any(same(option, answer, formulas) for option in gold.options[:1])
    if isinstance(gold, Labelled) or isinstance(answer, Labelled):
        return _same_labelled(gold, answer, formulas)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_group(gold, answer, formulas)
    for lettered, other in ((gold, answer), (answer, gold)):
        if isinstance(lettered, Option) and lettered.rest and not isinstance(other, Option):
            content = read(lettered.rest)
            return same(content, other, formulas) if lettered is gold else same(other, content, formulas)
    if isinstance(gold, Text) or isinstance(answer, Text):
        return _same_text(gold, answer, formulas)
    if isinstance(gold, Option) or isinstance(answer, Option):
        return _same_option(gold, answer, formulas)
    return _same_quantity(gold, answer, formulas)


def same_plain(gold: str, answer: str) -> bool:
    """`same` without math-verify: formulas must be written alike. Linear in the texts."""
    return same(read(gold), read(answer), lambda one, other: False)


def _same_text(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    """Compares texts letter by letter. A name of two or three letters also equals the product of these letters."""
    if isinstance(gold, Text) and isinstance(answer, Text):
        return gold.letters == answer.letters
    text, other = (gold, answer) if isinstance(gold, Text) else (answer, gold)
    assert isinstance(text, Text)
    if isinstance(other, Formula):
        if letters(without_fonts(other.latex)) == text.letters:
            return True
        if other.unit is None and re.fullmatch(r"[a-z]{2,3}", text.letters) and _PRODUCT.search(other.latex):
            product = Formula(" ".join(text.letters))
            return formulas(product, other) if text is gold else formulas(other, product)
    return False


def _same_labelled(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    if isinstance(gold, Labelled) and isinstance(answer, Labelled):
        if gold.label == answer.label:
            return same(gold.value, answer.value, formulas)
        both = isinstance(gold.value, Formula) or isinstance(answer.value, Formula)
        return both and formulas(Formula(gold.latex), Formula(answer.latex))
    equations = [r.latex for r in (gold, answer) if isinstance(r, Labelled | Formula) and "=" in r.latex]
    if len(equations) == 2:
        return formulas(*map(Formula, equations))
    gold, answer = (r.value if isinstance(r, Labelled) else r for r in (gold, answer))
    return same(gold, answer, formulas)


def _same_group(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    if isinstance(gold, Formula) or isinstance(answer, Formula):  # 1 < x < 2 is an interval, too
        pair = [item for item in (gold, answer) if isinstance(item, Group | Formula)]
        return all(not isinstance(item, Group) or item.brackets for item in pair) and formulas(
            *(Formula(item.latex) for item in pair)
        )
    mine = gold if isinstance(gold, Group) else Group("", (gold,), "")
    yours = answer if isinstance(answer, Group) else Group("", (answer,), "")
    kinds = {mine.brackets, yours.brackets}
    if len(kinds) == 2 and "" not in kinds:
        return False
    if not isinstance(gold, Group) or not isinstance(answer, Group):  # one value is the set of it alone
        return (
            kinds == {"", "{}"} and len(mine.items) == len(yours.items) and _each_has(mine.items, yours.items, formulas)
        )
    named = [isinstance(item, Labelled) for item in (*mine.items, *yours.items)]
    ordered = bool(kinds - {"", "{}"}) or (any(named) and not all(named))
    if ordered:
        pairs = zip(mine.items, yours.items, strict=False)
        return len(mine.items) == len(yours.items) and all(same(one, other, formulas) for one, other in pairs)
    if kinds == {""}:
        return len(mine.items) == len(yours.items) and _each_has(mine.items, yours.items, formulas, once=True)
    return _each_has(mine.items, yours.items, formulas)


def _each_has(gold: Sequence[Reading], answer: Sequence[Reading], formulas: Formulas, once: bool = False) -> bool:
    """Whether each element has an equal one on the other side, each used `once` or, in a set, as often as needed."""
    left = list(answer)
    for item in gold:
        at = next((i for i, other in enumerate(left) if same(item, other, formulas)), None)
        if at is None:
            return False
        if once:
            del left[at]
    return once or all(any(same(item, other, formulas) for item in gold) for other in answer)


def _same_option(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    if isinstance(gold, Option) and isinstance(answer, Option):
        return gold.letter.casefold() == answer.letter.casefold()
    letter, other = (gold, answer) if isinstance(gold, Option) else (answer, gold)
    assert isinstance(letter, Option)
    if isinstance(other, Formula):
        symbol = Formula(letter.letter)
        return formulas(symbol, other) if letter is gold else formulas(other, symbol)
    return False


def _same_quantity(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    assert isinstance(gold, Number | Formula) and isinstance(answer, Number | Formula)
    if isinstance(gold, Formula) and gold.unit == answer.unit and _written(gold) == _written(answer):
        return True
    factors = [Fraction(1)]
    if gold.unit is not None and answer.unit is not None:
        factors = answer.unit.factors(gold.unit)
    elif PERCENT in (gold.unit, answer.unit):
        factors.append(Fraction(1, 100) if gold.unit is None else Fraction(100))
    if isinstance(gold, Number) and isinstance(answer, Number):
        return any(gold.value == answer.value * factor for factor in factors)
    left = Formula(gold.latex)
    scaled = [
        Formula(answer.latex if factor == 1 else f"{Number(factor).latex}\\cdot({answer.latex})") for factor in factors
    ]
    degrees = _has(gold.unit, DEGREE)
    if degrees != _has(answer.unit, DEGREE) and all(u is None or _is_angle(u) for u in (gold.unit, answer.unit)):
        half_turn = "\\frac{180}{\\pi}" if degrees else "\\frac{\\pi}{180}"
        scaled.append(Formula(f"{half_turn}\\cdot({answer.latex})"))
    return any(formulas(left, right) for right in scaled)


def _written(quantity: Number | Formula) -> str:
    return re.sub(r"\s+", "", without_fonts(quantity.latex))


def _is_angle(unit: Unit) -> bool:
    return _has(unit, DEGREE) or _has(unit, RADIAN)


def _has(unit: Unit | None, meaning: Meaning) -> bool:
    return unit is not None and meaning in unit.meanings
