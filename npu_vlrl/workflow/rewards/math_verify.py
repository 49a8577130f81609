"""The last boxed answer against the gold: words, letters and numbers by their plain reading, formulas by math-verify.

Gold and box are read by `reading.read`. What it reads as a formula is parsed by the math-verify package as LaTeX and
never with a fallback, which reads `50 \\sqrt{` as 50. Its own timeouts use a signal and are switched off (0); the judge
pool kills a worker that takes too long.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.rewards.exact import LITERAL, literal_value
from npu_vlrl.workflow.rewards.extract import last_box
from npu_vlrl.workflow.rewards.functions import same_function
from npu_vlrl.workflow.rewards.reading import Ambiguous, Formula, Group, Labelled, Number, Option, Reading, Text, read, same

__all__ = ["check_gold", "equals", "last_box", "score"]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every start that its timeouts are off

NO_BOX_FEEDBACK = "Your answer has no \\boxed{}. Put your final answer in \\boxed{}."

_LATEX = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="all", equations=False
        ),
    ),
)
_DIGITS = 50
"""Decimal places of math-verify's comparisons inside equations and matrices."""


def score(answer: str, text: str) -> Verdict:
    """-1 without a `\\boxed{}`, 1 when the last box equals `answer`, else 0; solved when equal.

    `terms` are the `accuracy` (0 or 1) and the `format` (0, or -1 without a box). A wrong answer leaves the feedback
    to the workflow. Raises DataError when `answer` cannot be read, or not in one way.
    """
    box = last_box(text)
    equal = equals(answer, box)
    if box is None:
        return Verdict(-1.0, False, NO_BOX_FEEDBACK, {"accuracy": 0.0, "format": -1.0})
    return Verdict(float(equal), equal, terms={"accuracy": float(equal), "format": 0.0})


def check_gold(answer: str) -> None:
    """Raises DataError when `answer` cannot serve as a gold: not one value, not to be parsed, or equal to nothing.

    Compares formulas with a plain number, too: a gold that hangs there, as a tower of powers does, hangs for every
    answer.
    """
    gold = _read_gold(answer)
    for formula in _formulas(gold):
        _same_formula(formula, Formula("12345"))
        if not _same_formula(formula, formula):
            raise DataError(f"the gold answer {answer[:80]!r} does not even equal itself; give a defined, finite value")


def equals(answer: str, box: str | None) -> bool:
    """Whether the content of a box, if there is one, is the same answer as the gold `answer`.

    Raises DataError for a gold that cannot be read, or not in one way.
    """
    gold = _read_gold(answer)  # first: a bad gold must not hide behind an answer without a box
    return box is not None and same(gold, read(box), _same_formula)


def equals_published(answer: str, box: str) -> bool:
    """As `equals`, for the golds of published benchmarks, which nobody can correct: an ambiguous one is read as the
    English-speaking world writes it, `1,5` as the list of 1 and 5, and one that cannot be parsed equals nothing else.
    """
    gold = read(answer)
    return same(gold, read(box), _same_formula)


@lru_cache(maxsize=1024)
def _read_gold(answer: str) -> Reading:
    gold = answer.rstrip()
    if any(unicodedata.category(character) == "Cc" for character in gold):
        raise DataError(
            f"the gold answer {answer[:80]!r} holds a control character, probably a LaTeX command that lost its "
            "backslash (\\f of \\frac, \\t of \\times, …); write the backslash twice where the file was made"
        )
    reading = read(gold)
    if isinstance(reading, Ambiguous):
        raise DataError(
            f"the gold answer {answer[:80]!r} can be read as {' or as '.join(reading.meanings)}; {reading.remedy}"
        )
    if reading == Text(""):
        raise _unparsed(answer)
    for formula in _formulas(reading):
        if not _parse(formula.latex):
            raise _unparsed(answer)
    return reading


def _unparsed(answer: str) -> DataError:
    return DataError(
        f"the gold answer {answer[:80]!r} cannot be parsed by math-verify; write it as LaTeX, such as "
        "\\frac{1}{2}, 5\\sqrt{3} or 120^\\circ"
    )


def _formulas(reading: Reading) -> Iterator[Formula]:
    if isinstance(reading, Formula):
        yield reading
    elif isinstance(reading, Group):
        for item in reading.items:
            yield from _formulas(item)
    elif isinstance(reading, Labelled):
        yield from _formulas(reading.value)


def _same_formula(gold: Formula, answer: Formula) -> bool:
    left, right = _parse(gold.latex), _parse(answer.latex)
    if not left or not right:
        return False
    if len(left) == len(right) == 1 and (decided := same_function(left[0], right[0])) is not None:
        return decided
    return bool(verify(left, right, float_rounding=_DIGITS, numeric_precision=_DIGITS, timeout_seconds=0))


@lru_cache(maxsize=1024)
def _parse(latex: str) -> list[Any]:
    plain = LITERAL.sub(_exact_literal, latex).replace("°", "^\\circ ").replace("%", "\\%")
    return list(parse(f"\\boxed{{{plain}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=0))


def _exact_literal(literal: re.Match[str]) -> str:
    """`12{,}500` as 12500 and `0.1` as a fraction: math-verify would round decimals and split thousands."""
    if literal["comma"] and "{" not in literal[0]:
        return literal[0]  # the arguments of a function
    try:
        return Number(literal_value(literal)).latex if not literal[0].isdigit() else literal[0]
    except OverflowError:
        return literal[0]
