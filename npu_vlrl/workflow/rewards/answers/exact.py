"""Exact values of numbers in all notations: `1,234.5`, `1.2\\times10^{-3}`, `1\\frac{1}{2}`, `2B_{16}`.

A number is an expression of digits alone, and its value a fraction. Texts with a letter, a root or a function are left
to math-verify. Expects text of `normalise`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_MAX_BITS = 10_000
"""Maximum number of bits of numerator and of denominator: larger ones, such as towers of powers, are not computed."""

_MAX_DEPTH = 40
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"twelve": 12, "sixteen": 16, "bin": 2, "oct": 8, "dec": 10, "hex": 16}

_GROUPS = r"[1-9]\d{0,2}(?:(?:,\d{3})+|(?:\{,\}\d{3})+|(?: \d{3})+(?!\d)(?P<spaced>,\d+)?|(?:'\d{3})+)(?!\d)(?:\.\d+)?"
_DOTTED = r"\d{1,3}(?:\.\d{3}){2,}(?!\d)(?:(?:,|\{,\})\d+)?|\d{1,3}(?:\.\d{3})+(?:,|\{,\})\d+"
_COMMA = r"\d+(?:,|\{,\})\d+"
_POINT = r"\d+(?:\.\d*)?|\.\d+"
_REPEATED = r"\d*\.\d*\\(?:overline|bar|dot)\s*\{\d+\}"
_EXPONENT = r"[eE][-+]?\d+(?![\w.])"
_KINDS = {"repeated": _REPEATED, "dotted": _DOTTED, "groups": _GROUPS, "comma": _COMMA, "point": _POINT}
_ANY_KIND = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KINDS.items())
LITERAL = re.compile(f"(?:{_ANY_KIND})(?P<exponent>{_EXPONENT})?", re.ASCII)
_DIGITS_OF_BASE = r"\(?\s*(\d[\da-fA-F]*(?:\.[\da-fA-F]+)?|[A-F][\dA-F]+)\s*\)?"
_BASE = r"(?:_\s*\{?\s*(?:\\text\{(\w+)\}|(\w+))\s*\}?|(?:\\text\{)?\s*base\s*(\w+)\s*\}?)"
_BASED = re.compile(rf"{_DIGITS_OF_BASE}\s*{_BASE}", re.ASCII)
_TIMES = re.compile(r"\s*(?:\\times|\\cdot|\*|[x](?=\s*10\s*\^))\s*")
_DIVIDED = re.compile(r"\s*(?:/|\\div|:(?!:))\s*")


class TwoReadings(ValueError):
    """Raised for a number with more than one plain reading; `args` are the readings in words."""


class Parsed(NamedTuple):
    value: Fraction
    end: int


def exact(text: str) -> Fraction | None:
    """Value of all of `text`, or None when it is no number. Raises TwoReadings, as for `3 4`."""
    based = _based(text)
    if based is not None:
        return based
    parsed = exact_prefix(text)
    return parsed.value if parsed is not None and not text[parsed.end :].strip() else None


def exact_prefix(text: str) -> Parsed | None:
    """Longest number at the beginning of `text`, and its end position. Raises TwoReadings."""
    try:
        return _Parser(text).sum(0, 0)
    except (ZeroDivisionError, OverflowError):
        return None


def _based(text: str) -> Fraction | None:
    match = _BASED.fullmatch(text.strip())
    if match is None:
        prefixed = re.fullmatch(r"0(?:x[\da-f]{1,400}|b[01]{1,400}|o[0-7]{1,400})", text.strip(), re.IGNORECASE)
        return None if prefixed is None else Fraction(int(prefixed[0], 0))
    name = (match[2] or match[3] or match[4]).casefold()
    base = _BASES.get(name) or (int(name) if name.isdecimal() and len(name) < 3 else 0)
    whole, _, decimals = match[1].partition(".")
    if not 2 <= base <= 36 or len(match[1]) > _MAX_BITS // 6:
        return None
    try:
        return Fraction(int(whole + decimals, base), base ** len(decimals))
    except ValueError:  # a digit that the base has not
        return None


class _Parser:
    """Recursive descent over sums, products, powers and groups. Each method returns None where nothing fits."""

    def __init__(self, text: str) -> None:
        self.text = text

    def sum(self, at: int, depth: int) -> Parsed | None:
        sign = re.compile(r"\s*([-+])?\s*").match(self.text, at)
        assert sign is not None
        total = self.product(sign.end(), depth)
        if total is None:
            return None
        value, at = (-total.value if sign[1] == "-" else total.value), total.end
        while operator := re.compile(r"\s*([-+])\s*").match(self.text, at):
            term = self.product(operator.end(), depth)
            if term is None:
                break
            value = _bounded(value + term.value if operator[1] == "+" else value - term.value)
            at = term.end
        return Parsed(value, at)

    def product(self, at: int, depth: int) -> Parsed | None:
        first = self.power(at, depth)
        if first is None:
            return None
        value, at = first
        while True:
            times, divided = _TIMES.match(self.text, at), _DIVIDED.match(self.text, at)
            operator = times or divided
            if operator is None:
                factor = self._juxtaposed(at, depth)
            else:
                signed = re.compile(r"[-+]?").match(self.text, operator.end())
                assert signed is not None
                factor = self.power(signed.end(), depth)
                if factor is not None and signed[0] == "-":
                    factor = Parsed(-factor.value, factor.end)
            if factor is None:
                return Parsed(value, at)
            value, at = _bounded(value / factor.value if divided else value * factor.value), factor.end

    def _juxtaposed(self, at: int, depth: int) -> Parsed | None:
        """Parses a factor without a sign before it: a group, as in `2(3)`."""
        opening = re.compile(r"\s*(?=\()").match(self.text, at)
        return None if opening is None else self.power(opening.end(), depth)

    def power(self, at: int, depth: int) -> Parsed | None:
        base = self.atom(at, depth)
        if base is None:
            return None
        caret = re.compile(r"\s*(?:\^|\*\*)\s*").match(self.text, base.end)
        if caret is None:
            return base
        signed = re.compile(r"([-+]?)(?=[\d(])").match(self.text, caret.end())
        if signed is not None:
            exponent = self.atom(signed.end(), depth + 1)
        else:
            exponent = self.group(caret.end(), depth + 1, "{", "}")
        if exponent is None or exponent.value.denominator != 1:
            return None
        power = -exponent.value if signed is not None and signed[1] == "-" else exponent.value
        size = max(base.value.numerator.bit_length(), base.value.denominator.bit_length())
        if abs(power) * size > _MAX_BITS:
            raise OverflowError
        return Parsed(base.value ** int(power), exponent.end)

    def atom(self, at: int, depth: int) -> Parsed | None:
        if self.text.startswith("\\frac", at):
            return self.fraction(at, depth)
        if self.text.startswith("(", at):
            return self.group(at, depth, "(", ")")
        if self.text.startswith("{", at):
            return self.group(at, depth, "{", "}")
        return self.number(at, depth)

    def group(self, at: int, depth: int, opening: str, closing: str) -> Parsed | None:
        if depth > _MAX_DEPTH or not self.text.startswith(opening, at):
            return None
        inner = self.sum(at + 1, depth + 1)
        end = None if inner is None else re.compile(r"\s*" + re.escape(closing)).match(self.text, inner.end)
        return None if inner is None or end is None else Parsed(inner.value, end.end())

    def fraction(self, at: int, depth: int) -> Parsed | None:
        skip = re.compile(r"\\frac\s*").match(self.text, at)
        above = None if skip is None else self.group(skip.end(), depth, "{", "}")
        if above is None:
            return None
        gap = re.compile(r"\s*").match(self.text, above.end)
        below = None if gap is None else self.group(gap.end(), depth, "{", "}")
        return None if below is None else Parsed(above.value / below.value, below.end)

    def number(self, at: int, depth: int) -> Parsed | None:
        """Parses a literal, or a mixed number: an integer and a proper fraction after it."""
        literal = LITERAL.match(self.text, at)
        if literal is None:
            return None
        value, end = literal_value(literal), literal.end()
        if re.compile(r"\s*\\frac").match(self.text, end):
            gap = re.compile(r"\s*").match(self.text, end)
            part = None if gap is None else self.fraction(gap.end(), depth)
        else:
            slashed = re.compile(r"\s+(\d+)\s*/\s*(\d+)(?![\d.])").match(self.text, end)
            part = None if slashed is None else Parsed(Fraction(int(slashed[1]), int(slashed[2])), slashed.end())
        if part is not None:
            if value.denominator != 1 or not 0 < part.value < 1:
                raise TwoReadings(f"{value} + {part.value}", f"{value} times {part.value}")
            return Parsed(value + part.value, part.end)
        beside = re.compile(r"\s+(\d[\d.]*)").match(self.text, end)
        if beside is not None:
            raise TwoReadings(f"the list {literal[0]}, {beside[1]}", f"{literal[0]} times {beside[1]}")
        return Parsed(value, end)


def literal_value(literal: re.Match[str]) -> Fraction:
    """Value of a match of `LITERAL`. Raises OverflowError for more digits than `_MAX_BITS` can hold."""
    exponent = int(literal["exponent"][1:]) if literal["exponent"] and len(literal["exponent"]) < 9 else 0
    if len(literal[0]) + abs(exponent) > _MAX_BITS // 5 or len(literal["exponent"] or "") >= 9:
        raise OverflowError
    scale = Fraction(10) ** exponent
    if literal["repeated"]:
        whole, period = re.split(r"\\\w+\s*", literal["repeated"].rstrip("}"))
        whole, period = whole.replace("{", ""), period.replace("{", "")
        places = len(whole.partition(".")[2])
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        return (Fraction(whole + "0" if whole != "." else "0") + tail) * scale
    if literal["dotted"]:
        digits = re.sub(r",|\{,\}", "_", literal["dotted"]).replace(".", "").replace("_", ".")
    elif literal["groups"]:
        digits = re.sub(r"[, '{}]", "", literal["groups"].removesuffix(literal["spaced"] or ""))
        digits += (literal["spaced"] or "").replace(",", ".")
    elif literal["comma"]:
        digits = re.sub(r",|\{,\}", ".", literal["comma"])
    else:
        digits = literal["point"]
    return Fraction(digits.rstrip(".") or "0") * scale


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise OverflowError
    return value
