"""Rule `math_verify`: compares the last boxed answer with the gold: formulas by math-verify, others by plain readings.

Gold and box are read by `reading.read`. A formula is parsed as LaTeX by math-verify's parser, without its search for an
answer, which drops units and reads `50 \\sqrt{` as 50. Its own timeouts use a signal and are switched off (0); the
judge pool kills a worker that takes too long.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.rewards.answers import Ambiguous, Formula, Group, Labelled, Number, Reading, Text, read, same
from npu_vlrl.workflow.rewards.answers.exact import LITERAL, literal_value
from npu_vlrl.workflow.rewards.answers.functions import same_function
from npu_vlrl.workflow.rewards.extract import last_box
from npu_vlrl.workflow.thought import split_thought

__all__ = ["check_gold", "equals", "last_box", "score"]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every start that its timeouts are off

NO_BOX_FEEDBACK = "Your answer has no \\boxed{}. Put your final answer in \\boxed{}."

_NORMALISATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
"""Keeps the case of symbols: in lower case R^2 - r^2 would be 0."""

_DIGITS = 50
"""Decimal places of math-verify's comparisons inside equations and matrices."""

LOWEST = -1.0


def score(answer: str, text: str) -> Verdict:
    """Scores -1 without a `\\boxed{}` outside of thoughts, 1 and solved when the last one equals `answer`, else 0.

    `terms` are the `accuracy` (0 or 1) and the `format` (0, or -1 without a box). A wrong answer leaves the feedback
    to the workflow. Raises DataError when `answer` cannot be read, or not in one way.
    """
    box = last_box(split_thought(text).answer)
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
    """Whether the content of a box, or a text without one, is the same answer as the gold `answer`.

    Raises DataError for a gold that cannot be read in exactly one way.
    """
    gold = _read_gold(answer)  # first: a bad gold must not hide behind an answer without a box
    return box is not None and same(gold, read(box), _same_formula)


def equals_published(answer: str, box: str) -> bool:
    """`equals` for the golds of published benchmarks, which cannot be corrected.

    A gold with several readings has the first, that of English texts: `1,5` is a list. A gold that cannot be read
    equals only the same text.
    """
    gold, said = read(answer), read(box)
    return same(gold, said, _same_formula) or (gold == said and gold != Text(""))


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
        raise DataError(reading.refusal(answer))
    if reading == Text(""):
        raise _unparsed(answer)
    for formula in _formulas(reading):
        if _parse(formula.latex) is None:
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
    if left is None or right is None:
        return False
    if (decided := same_function(left, right)) is not None:
        return decided
    return bool(
        verify(
            left,
            right,
            float_rounding=_DIGITS,
            numeric_precision=_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=0,
        )
    )


@lru_cache(maxsize=1024)
def _parse(latex: str) -> Any:
    """Parses a formula to a sympy object; None when it cannot be parsed."""
    plain = LITERAL.sub(_exact_literal, latex)
    for character, command in (
        ("°", "^\\circ "),
        ("%", "\\%"),
        ("⟨", "\\langle "),
        ("⟩", "\\rangle "),
        ("Ω", "\\Omega "),
    ):
        plain = plain.replace(character, command)
    try:
        return latex2sympy(
            plain,
            is_real=not should_treat_as_complex(plain),
            convert_degrees=True,
            normalization_config=_NORMALISATION,
            conversion_config=_CONVERSION,
        )
    except Exception:  # of any kind: its grammar, its own code and sympy's raise what they like
        return None


def _exact_literal(literal: re.Match[str]) -> str:
    """Rewrites `12{,}500` as 12500 and `0.1` as a fraction: math-verify would round decimals and split thousands."""
    if literal["comma"] and "{" not in literal[0]:
        return literal[0]  # the arguments of a function
    try:
        return Number(literal_value(literal)).latex if not literal[0].isdigit() else literal[0]
    except OverflowError:
        return literal[0]
