"""Finds a short answer in a text. Everything takes time linear in the text."""

from __future__ import annotations

import math
import re

from npu_vlrl.workflow.rewards.math_verify import last_box

_LETTER = re.compile(r"\(([A-Za-z])\).*|([A-Za-z])(?:[.:),].*)?", re.DOTALL)
_SAID = re.compile(r"answer(?: is)?[\s:*(]*(?:(?:option|choice)[\s:*(]*)?([A-Z])(?![A-Za-z'])", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


def boxed(text: str) -> str:
    """The content of the last `\\boxed{}` without LaTeX for text and percent; without a box all of the text."""
    box = last_box(text)
    if box is None:
        return text.strip()
    inner = re.fullmatch(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", box.strip())
    return (inner[1] if inner else box).replace("\\%", "%").strip().strip("$").strip()


def letter(text: str) -> str | None:
    """The option's letter in the last box, such as `B`, `(B)` or `B. 12 cm`; without a box, the last one that stands
    after `answer` or `answer is`.
    """
    if last_box(text) is not None:
        found = _LETTER.fullmatch(boxed(text))
        return (found[1] or found[2]).upper() if found else None
    said = [match[1] for match in _SAID.finditer(text)]
    return next((word for word in reversed(said) if word.isupper()), None)


def first_letter(text: str) -> str | None:
    """The letter at the beginning, alone or after `(`, `Option` or `The answer is`, as MMStar's evaluation reads it."""
    plain = text.strip().replace("\n", " ").casefold()
    for opening in ("the answer is ", "option ", "(", ""):
        if plain.startswith(opening) and len(plain) > len(opening):
            found = plain[len(opening)].upper()
            return found if "A" <= found <= "Z" else None
    return None


def yes_or_no(text: str) -> str | None:
    """`yes` or `no` among the first four letters of the box, or of the text, as MME's evaluation reads it."""
    plain = boxed(text).casefold().replace(".", "").strip()
    if plain in ("y", "n"):
        return "yes" if plain == "y" else "no"
    return next((word for word in ("yes", "no") if word in plain[:4]), None)


def number(text: str) -> float | None:
    """The last number, without the commas between its thousands; None without one, or where it is not finite."""
    found = _NUMBER.findall(text)
    value = float(found[-1].replace(",", "")) if found else math.inf
    return value if math.isfinite(value) else None
