"""Interprets commas: between the elements of a list, between thousands, or before decimals."""

from __future__ import annotations

import re
from collections.abc import Sequence

_AND_OR = (" and ", " or ", "\\text{and}", "\\text{or}", "\\text{ and }", "\\text{ or }")
_BEFORE = r"[-+]?\s*(?:(?:US)?[$€£¥]\s*)?"
_THOUSANDS = re.compile(_BEFORE + r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?(?![\d,])[^,]*", re.DOTALL)
_EUROPEAN = re.compile(_BEFORE + r"\d{1,3}(?:(?:\.\d{3}){2,}|(?: \d{3})+),\d+")
_INDIAN = re.compile(r"[-+]?\d{1,2}(?:,\d{2})+,\d{3}")
_DECIMAL = re.compile(_BEFORE + r"(?:\d+|\d{1,3}(?:\.\d{3})+),\d+(?:[eE][-+]?\d+)?(?![\d.,^/:(\[])[^,(\[]*")


def split(text: str, separators: Sequence[str]) -> list[str]:
    """Splits `text` at separators outside of all brackets. `{,}`, `<=` and `!=` are none."""
    pattern = "|".join(map(re.escape, separators))
    parts, start, depth = [], 0, 0
    for token in re.finditer(rf"\{{,\}}|\\[{{}}]|[<>!:]=|(?P<cut>{pattern})|[()\[\]{{}}⟨⟩]", text):
        if token[0] in ("(", "[", "{", "\\{", "⟨"):
            depth += 1
        elif token[0] in (")", "]", "}", "\\}", "⟩"):
            depth -= 1
        elif token["cut"] and depth <= 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def elements(text: str) -> list[str]:
    """Elements of a list without brackets; a text that is no list is one element."""
    parts = split(text, (";",))
    if len(parts) == 1 and not _EUROPEAN.fullmatch(text):
        parts = [part for side in split(text, _AND_OR) for part in _between_commas(side)]
    return [part.strip() for part in parts if part.strip()] or [text]


def within_brackets(inner: str) -> tuple[list[str], bool]:
    """Elements between brackets, and whether semicolons separate them, so that commas begin decimals."""
    parts = split(inner, (";",))
    return [part.strip() for part in (parts if len(parts) > 1 else _at_commas(inner))], len(parts) > 1


def comma_is_unclear(text: str) -> bool:
    """Whether commas without a space may separate a list or belong to one number: `1,5`, `12,34,567`."""
    return bool(_INDIAN.fullmatch(text) or (_DECIMAL.fullmatch(text) and not _THOUSANDS.fullmatch(text)))


def without_indian_commas(text: str) -> str:
    """Replaces `12,34,567` by 1234567; other texts are unchanged."""
    return text.replace(",", "") if _INDIAN.fullmatch(text) else text


def _between_commas(text: str) -> list[str]:
    return [text] if _THOUSANDS.fullmatch(text.strip()) else _at_commas(text)


def _at_commas(text: str) -> list[str]:
    """Splits at commas. Where some precede a space, those between digits and three digits separate thousands."""
    spaced = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "\ue001", text) if re.search(r",\s", text) else text
    return [part.replace("\ue001", ",") for part in split(spaced, (",",))]
