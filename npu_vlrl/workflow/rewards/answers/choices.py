"""Finds the letter of an option in a short answer, or stated in a longer text. Linear in the text."""

from __future__ import annotations

import re

_NAMED = (
    r"(?:(?:the\s+)?(?:(?:correct|right|final|best)\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s*|"
    r"(?:答案|选项?|故选)\s*[是为]?\s*:?\s*)"
)
_OPTION = re.compile(
    rf"(?:{_NAMED})*(?:"
    r"[(\[]\s*([A-Za-z])\s*[)\]]\s*(?P<a>$|[.:,]\s*(?=\S)|(?![-+*/^_=<>!(|])|(?=-\S))|"
    r"([A-Za-z])\s*(?P<b>$|项|[.:)]\s*$|[.:)]\s+|[.:)](?=[^\sA-Za-z=])|,\s+(?=[^\s,]{2})|\s+-+\s+(?=[^\W\d_]{2}))"
    r")",
    re.IGNORECASE,
)
_LIST = re.compile(r"[A-Za-z](?:(?:\s*(?:[,;&]|\band\b|\bor\b))+\s*[A-Za-z])+")
_STATED = re.compile(
    r"\banswer(?![A-Za-z])(?:[^.\n:=：]{0,60}?(?:\bis\b|\bbe\b|[:=：]))?|答案[是为:：]*|[故应]选", re.IGNORECASE
)
_WINDOW = 60
_CAPITAL = re.compile(r"(?<![A-Za-z'\\])([A-Z])(?![A-Za-z'])")
_FONT = re.compile(r"\\(?:text|math)[a-z]*\s*\{|[\\${}]")


def option(plain: str) -> tuple[str, str] | None:
    """Letter and rest of a normalised text that is one option: `B`, `(B)`, `B. 12 cm`, `Option B`, `B - the last`."""
    found = None if is_list_of_letters(plain) else _OPTION.match(plain)
    if found is None:
        return None
    return (found[1] or found[3]), plain[found.end() :].strip()


def is_list_of_letters(plain: str) -> bool:
    """Whether a text lists several options or variables, whose order does not count: `A, B` or `x and y`."""
    return _LIST.fullmatch(plain.strip()) is not None


def stated(text: str) -> str | None:
    """The capital letter that the text states last after `answer`, `answer is` or `答案`, or None.

    The pronoun in `I think`, the article in `A cat` and a letter after `not` are no options. `A or B` states neither.
    """
    for opening in reversed(list(_STATED.finditer(text))):
        line = re.match(r"\s*[^\n]*", text[opening.end() : opening.end() + _WINDOW])
        window = _FONT.sub(" ", line[0] if line else "")
        direct = opening[0].casefold() == "answer"
        for capital in _CAPITAL.finditer(window):
            before, after = window[: capital.start()], window[capital.end() :]
            if direct and re.sub(r"\b(?:option|choice)\b", "", before, flags=re.IGNORECASE).strip(" :*(\n"):
                break
            if re.search(r"[.!?]\s", before) or re.match(r"\W*(?:or|and|[,/&])\W*[A-Z](?![A-Za-z'])", after):
                break
            word = capital[1] in "AI" and re.match(r" (?!or|is|because|since)[a-z]", after)
            if word or re.search(r"\bnot\s+\W*$", before):
                continue
            return capital[1]
    return None
