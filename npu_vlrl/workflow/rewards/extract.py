"""Finds a short answer in a text. Everything takes time linear in the text."""

from __future__ import annotations

import re
from fractions import Fraction

from npu_vlrl.workflow.rewards.answers.choices import option, stated
from npu_vlrl.workflow.rewards.answers.normalise import normalise, without_fonts
from npu_vlrl.workflow.rewards.answers.reading import LONGEST, quantity

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


def last_box(text: str) -> str | None:
    """Content of the `\\boxed{…}` that closes last, or None. Braces balance; `\\{` and `\\}` are not braces.

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


def boxed(text: str) -> str:
    """Content of the last `\\boxed{}` without fonts and delimiters; without a box, all of the text."""
    box = last_box(text)
    found = text.strip() if box is None else box
    return found if len(found) > LONGEST else without_fonts(normalise(found))


def letter(text: str) -> str | None:
    """Letter of the option in the last box, such as `B`, `(B)` or `B. 12 cm`; where the box holds something else or
    there is none, the last letter after `answer` or `answer is`.
    """
    found = option(boxed(text)) if last_box(text) is not None else None
    return stated(text) if found is None else found[0].upper()


def first_letter(text: str) -> str | None:
    """Letter at the beginning, alone or after `(`, `Option` or `The answer is`, as MMStar's evaluation reads it."""
    plain = text.strip().replace("\n", " ").casefold()
    for opening in ("the answer is ", "option ", "(", ""):
        if plain.startswith(opening) and len(plain) > len(opening):
            found = plain[len(opening)].upper()
            return found if "A" <= found <= "Z" else None
    return None


def yes_or_no(text: str) -> str | None:
    """Reads `yes` or `no` among the first four letters of the box, or of the text, as MME's evaluation does."""
    plain = boxed(text).casefold().replace(".", "").strip()
    if plain in ("y", "n"):
        return "yes" if plain == "y" else "no"
    return next((word for word in ("yes", "no") if word in plain[:4]), None)


def number(text: str) -> Fraction | None:
    """Value of the number in the last box, None where it holds something else; without a box, of the last number."""
    box = last_box(text)
    found = [box] if box is not None else _NUMBER.findall(text)[-1:]
    value = quantity(found[0].rstrip(",")) if found else None
    return None if value is None else value.value
