"""The letter of an option: in a short answer, and where a longer text states it. Linear in the text."""

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
_STATED = re.compile(r"\banswer(?![A-Za-z])(?:[^.\n:=]{0,60}?(?:\bis\b|[:=]))?|答案[是为:：]*|[故应]选", re.IGNORECASE)
_WINDOW = 60
_CAPITAL = re.compile(r"(?<![A-Za-z'\\])([A-Z])(?![A-Za-z'])")
_FONT = re.compile(r"\\(?:text|math)[a-z]*\s*\{|[\\${}]")


def option(plain: str) -> tuple[str, str] | None:
    """Letter and rest of a normalised text that is one option: `B`, `(B)`, `B. 12 cm`, `Option B`, `B - the last`."""
    found = _OPTION.match(plain)
    if found is None:
        return None
    letter, rest = found[1] or found[3], plain[found.end() :].strip()
    if found[1] is None and re.match(r"[A-Za-z]\s*,\s+[A-Za-z](?![A-Za-z])", plain[found.start(3) :]):
        return None  # a list of letters
    if (
        found[3]
        and re.match(r"[A-Za-z]\s*,", plain[found.start(3) :])
        and re.search(r",\s*(?:and|or)?\s*[A-Za-z]$", plain)
    ):
        return None
    return letter, rest


def stated(text: str) -> str | None:
    """The capital letter that the text states last after `answer`, `answer is` or `答案`, or None.

    The pronoun in `I think` and the article in `A cat` are no options, nor is what stands after `not`.
    """
    for opening in reversed(list(_STATED.finditer(text))):
        line = re.match(r"[^\n]*", text[opening.end() : opening.end() + _WINDOW])
        window = _FONT.sub(" ", line[0] if line else "")
        direct = opening[0].casefold() == "answer"
        for capital in _CAPITAL.finditer(window):
            before, after = window[: capital.start()], window[capital.end() :]
            if direct and re.sub(r"\b(?:option|choice)\b", "", before, flags=re.IGNORECASE).strip(" :*("):
                break
            if re.search(r"\bnot\s+\W*$|[.!?]\s", before) or (capital[1] in "AI" and re.match(r" [a-z]", after)):
                continue
            return capital[1]
    return None
