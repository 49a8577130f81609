"""The last boxed answer against the gold, compared as mathematics by the math-verify package.

Only LaTeX is parsed and never a fallback: with one, math-verify reads `50 \\sqrt{` as 50. Its own timeouts use a signal
and are switched off (0); the judge pool kills a worker that takes too long.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.thought import split_thought

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every start that its timeouts are off

NO_BOX_FEEDBACK = "Your answer has no \\boxed{}. Put your final answer in \\boxed{}."

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def score(answer: str, text: str) -> Verdict:
    """-1 without a `\\boxed{}` outside of thoughts, 1 when the last one equals `answer`, else 0; solved when equal.

    `terms` are the `accuracy` (0 or 1) and the `format` (0, or -1 without a box). A wrong answer leaves the feedback
    to the workflow. Raises DataError when `answer` cannot be parsed.
    """
    box = last_box(split_thought(text).answer)
    equal = equals(answer, box)
    if box is None:
        return Verdict(-1.0, False, NO_BOX_FEEDBACK, {"accuracy": 0.0, "format": -1.0})
    return Verdict(float(equal), equal, terms={"accuracy": float(equal), "format": 0.0})


def check_gold(answer: str) -> None:
    """Raises DataError when `answer` cannot serve as a gold because it cannot be parsed or equals nothing.

    Compares it with a plain number too: a gold that hangs there, as a tower of powers does, hangs for every answer.
    """
    gold = _parse_gold(answer)
    verify(gold, _parse("\\boxed{12345}"), timeout_seconds=0)
    if not verify(gold, gold, timeout_seconds=0):
        raise DataError(f"the gold answer {answer[:80]!r} does not even equal itself; give a defined, finite value")


def equals(answer: str, box: str | None) -> bool:
    """Whether the content of a box, if there is one, is the same mathematics as the gold `answer`."""
    gold = _parse_gold(answer)  # first: a bad gold must not hide behind an answer without a box
    return box is not None and bool(verify(gold, _parse(f"\\boxed{{{box}}}"), timeout_seconds=0))


def last_box(text: str) -> str | None:
    """The content of the `\\boxed{…}` that closes last, or None. Braces balance; `\\{` and `\\}` are not braces.

    Takes time linear in `text`, which may be a megabyte of nothing but openings.
    """
    open_braces: list[int | None] = []  # where the content of a box begins; None for any other brace
    box = None
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else None
            box = box if start is None else slice(start, token.start())
        elif token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(None if token[0] == "{" else token.end())
    return None if box is None else text[box]


@lru_cache(maxsize=1024)
def _parse_gold(answer: str) -> list[Any]:
    gold = answer.rstrip()
    if any(unicodedata.category(character) == "Cc" for character in gold):
        raise DataError(
            f"the gold answer {answer[:80]!r} holds a control character, probably a LaTeX command that lost its "
            "backslash (\\f of \\frac, \\t of \\times, …); write the backslash twice where the file was made"
        )
    parsed = _parse(gold if "$" in gold else f"${gold}$")
    if not parsed:
        raise DataError(
            f"the gold answer {answer[:80]!r} cannot be parsed by math-verify; write it as LaTeX, such as "
            "\\frac{1}{2}, 5\\sqrt{3} or 120^\\circ"
        )
    return parsed


def _parse(latex: str) -> list[Any]:
    return list(parse(latex, _LATEX, fallback_mode="no_fallback", parsing_timeout=0))
