"""Reads a short answer as a word, an option's letter, an exact number with its unit, a tuple, or a formula."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from npu_vlrl.workflow.rewards.answers.choices import is_list_of_letters, option
from npu_vlrl.workflow.rewards.answers.exact import TwoReadings, exact, exact_prefix
from npu_vlrl.workflow.rewards.answers.lists import (
    comma_is_unclear,
    elements,
    split,
    within_brackets,
    without_indian_commas,
)
from npu_vlrl.workflow.rewards.answers.normalise import normalise, without_fonts
from npu_vlrl.workflow.rewards.answers.types import Ambiguous, Formula, Group, Labelled, Number, Option, Reading, Text
from npu_vlrl.workflow.rewards.answers.units import CURRENCY, Unit, parse_unit, scale

LONGEST = 2000
"""Maximum length of an answer that is read, in characters; a longer one is compared by its characters."""

_MAX_NESTING = 20
_COMMA_REMEDY = "write a decimal point (1.5), a space after the comma of a list (1, 5), or no separator of thousands"
_SIGN_REMEDY = "write the sign between them (\\cdot, + or -), or a list with a comma and a space"
_RANGE_REMEDY = "write spaces around the minus of a difference, or a range with `to`"
_NAMED_FIGURES = r"angle|triangle|overline|overrightarrow|overleftrightarrow|vec|bar|hat|widehat|odot"
_RELATED = r"parallel|perp|cong|sim|to|rightarrow"
_NAMES = re.compile(
    rf"(?:[A-Za-z\s{{}}',]|\\(?:{_NAMED_FIGURES}|{_RELATED})(?![A-Za-z]))+|(?:[A-Z][a-z]?(?:_\s*(?:\{{\w+\}}|\w))?)+"
)
"""Names of figures, `\\triangle ABC`, of points and of substances, `H_2O`: their order counts."""
_AS_WRITTEN = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{4}|\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?m)?|\d{1,2}\s*[ap]\.?m|"
    r"\d+(?:st|nd|rd|th)|[\d.]+ to [\d.]+\D*",
    re.IGNORECASE,
)
"""Dates, times, ordinals and ranges, in which nothing is computed."""
_RANGE = re.compile(r"(\d+)-(\d+)(?:\s*[^\W\d_]*)?")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_UNIT_AT_END = re.compile(
    r"(?<=[\s}\d)])(?:\s*(?:\\text\{[^{}]*\}|(?<![A-Za-z\\])[A-Za-z]{2,}|[°%]|[\u4e00-\u9fff]+|[/*]|\\cdot)\s*"
    r"(?:\^\s*(?:\{-?\d\}|-?\d))?){1,6}$"
)


def read(text: str) -> Reading:
    """Reads a gold or an answer, which may be anything. Takes bounded time up to `LONGEST`, linear time beyond."""
    return Text(letters(text)) if len(text) > LONGEST else _read(normalise(text), 0)


def quantity(text: str) -> Number | None:
    """Number with its unit, if it is all of `text`: also as `x = 5` or with a decimal comma. None for others, and for a
    range such as the `18-29` of an age group.
    """
    reading = read(text)
    if isinstance(reading, Labelled):
        reading = reading.value
    if isinstance(reading, Ambiguous) and not any(isinstance(option, Text) for option in reading.options):
        reading = next((option for option in reading.options if isinstance(option, Number)), reading)
    return reading if isinstance(reading, Number) else None


def letters(text: str) -> str:
    """Letters by which words are compared: without spaces, case, quotes and final marks."""
    return re.sub(r"[\s\"'`]+", "", text).rstrip(".,;!").casefold()


def _read(text: str, depth: int, decimal_comma: bool = False) -> Reading:
    plain = without_fonts(text)
    if depth > _MAX_NESTING:
        return Text(letters(plain))
    choice = option(plain)
    if choice is not None:
        return Option(*choice)
    if _is_words(plain):
        return Text(letters(plain))
    items = [text] if decimal_comma or _is_sum_of_units(text) else elements(text)
    if len(items) > 1:
        listed = Group("", _spread(_read(item, depth + 1, ";" in text) for item in items), text)
        number = _quantity(without_indian_commas(text)) if comma_is_unclear(text) else None
        return _unclear_comma(items, listed, number) if isinstance(number, Number) else listed
    return (
        _approximate(text, depth)
        or _labelled(text, depth)
        or _plus_minus(text, depth)
        or _group(text, depth)
        or _quantity(text)
        or _rest(text, plain)
    )


def _is_words(plain: str) -> bool:
    """Whether a text is words: at least two letters, or one of a script without spaces, and nothing that computes, as
    `x-y`, `f(x)` and `y'` do.
    """
    if not re.search(r"[^\W\d_].*[^\W\d_]|[^\W\d_\x00-\x7f]", plain) or re.search(r"[\d\\^_=+*/<>|{}%$°&~@#]", plain):
        return False
    runs = re.findall(r"[^\W\d_]+", plain)
    if re.search(r"[-()\[\]']", plain) and any(len(run) == 1 and run.isascii() for run in runs):
        return bool(re.search(r"\w\w'\w", plain)) and not re.search(r"[-()\[\]]", plain)
    return not is_list_of_letters(plain)


def _unclear_comma(items: list[str], listed: Group, number: Number) -> Ambiguous:
    value = number.value
    shown = str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
    return Ambiguous((f"the list {', '.join(items)}", f"the number {shown}"), (listed, number), _COMMA_REMEDY)


def _approximate(text: str, depth: int) -> Reading | None:
    """Value of `10\\pi \\approx 31.4`: the side before the sign, or the side after it if that is a name or empty."""
    first, *others = (part.strip() for part in split(text, ("\\approx",)))
    if not others or not others[0]:
        return None
    if not first or _is_label(first):
        return _read(others[0], depth + 1)
    value = _read(first, depth + 1)
    return Ambiguous((first, *others), (value,), "write the exact value alone")


def _labelled(text: str, depth: int) -> Reading | None:
    """Reads `label = value`, also as a chain `x = 2 + 3 = 5`, or a point `P(1,2)`; None for an equation: a formula."""
    point = re.fullmatch(r"([A-Z]'?)\s*(\([^()]*,[^()]*\))", text)
    if point is not None:
        return Labelled(letters(point[1]), _read(point[2], depth + 1), text)
    parts = [part.strip() for part in split(text, ("=", "\\in ", "\\in{"))]
    if len(parts) < 2 or not all(parts):
        return None
    if not _is_label(parts[0]) and _is_label(parts[-1]):
        parts = [parts[-1], *parts[:-1]]
    name = letters(without_fonts(parts[0])).replace("m\\angle", "\\angle") if _is_label(parts[0]) else ""
    try:
        values = [exact(part) for part in parts[bool(name) :]]
    except TwoReadings:
        return None
    if not name and None in values:
        return None
    if len(set(values) - {None}) > 1 and values[-1] is not None:
        return Text(letters(text))  # a chain that contradicts itself is no number
    value = _read(parts[-1], depth + 1)
    return Labelled(name, value, text) if name else value


def _is_label(text: str) -> bool:
    plain = re.sub(r"_\s*(?:\{[^{}]*\}|\w)", "", without_fonts(text))
    plain = re.sub(rf"\\(?:{_NAMED_FIGURES}|measuredangle|Delta)(?![A-Za-z])", "", plain)
    plain = re.sub(r"\\(?:alpha|beta|gamma|theta|phi|lambda|mu|rho|sigma|omega)(?![A-Za-z])", "a", plain)
    words = r"[\s{}]*[^\W\d_][^\W\d_\s{}'.]*(?:[\s{}'.]+[^\W\d_]*)*(?:\([\w\s,]*\))?[\s{}]*"
    return len(plain) <= 40 and re.fullmatch(words, plain) is not None


def _plus_minus(text: str, depth: int) -> Reading | None:
    if not re.search(r"\\pm(?![A-Za-z])", text) or text.startswith("\\{"):  # in a set each element has two
        return None
    sides = []
    for sign, other in ("+-", "-+"):
        side = re.sub(r"\\mp(?![A-Za-z])", other, re.sub(r"\\pm(?![A-Za-z])", sign, text))
        sides.append(_read(side.removeprefix("+").strip(), depth + 1))
    return Group("", tuple(sides), text)


def _group(text: str, depth: int) -> Reading | None:
    """Reads a tuple, set or interval: brackets around all of the text with commas or semicolons within."""
    opening = next((mark for mark in ("\\{", "(", "[", "⟨") if text.startswith(mark)), None)
    closing = next((mark for mark in ("\\}", ")", "]", "⟩") if text.endswith(mark)), None)
    if opening is None or closing is None or len(text) <= len(opening) + len(closing):
        return None
    inner = text[len(opening) : -len(closing)]
    if not _balanced(inner):
        return None
    parts, semicolons = within_brackets(inner)
    brackets = opening.strip("\\") + closing.strip("\\")
    if len(parts) == 1 and brackets == "()":
        return _read(inner.strip(), depth + 1)
    if not all(parts) or (len(parts) == 1 and (brackets not in ("{}", "[]") or "\\mid" in inner)):
        return None
    values = (_read(part, depth + 1, semicolons) for part in parts)
    return Group(brackets, _spread(values) if brackets == "{}" else tuple(values), text)


def _spread(values: Iterable[Reading]) -> tuple[Reading, ...]:
    """Elements of a list or set, where `1 \\pm 2` counts as two."""
    lists = (value.items if isinstance(value, Group) and not value.brackets else (value,) for value in values)
    return tuple(item for items in lists for item in items)


def _balanced(text: str) -> bool:
    depth = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth += 1 if bracket in "([{" else -1
        if depth < 0:
            return False
    return depth == 0


def _quantity(text: str) -> Reading | None:
    """Reads a number with a currency before it and a unit after it; None for anything else."""
    if _AS_WRITTEN.fullmatch(text):
        return Text(letters(text))
    money = re.match(rf"([-+]?)\s*({CURRENCY.pattern})\s*([-+]?)(?=[\s\d.\\])", text)
    body = text if money is None else f"{money[1]}{money[3]}{text[money.end() :].lstrip()}"
    currency = None if money is None else parse_unit(money[2].rstrip("."))
    try:
        parsed = exact_prefix(body)
        whole = exact(body)
    except TwoReadings as readings:
        return Ambiguous(tuple(map(str, readings.args)), (), _SIGN_REMEDY)
    if whole is not None:
        return _range(text, Number(whole, currency))
    if parsed is None:
        return None
    places, rest = scale(body[parsed.end :])
    value = parsed.value * 10**places
    unit = _unit_behind(rest)
    if money is not None and currency is not None and (unit is None or not currency.factors(unit)):
        unit = parse_unit(f"{money[2]} {rest}")
    if unit is None and rest.strip():
        return _compound(value, rest)
    return _range(text, Number(value, unit))


def _unit_behind(rest: str) -> Unit | None:
    """Unit behind a number: `cm`, or `(cm)`, where words in brackets that are no units are remarks."""
    remark = re.fullmatch(r"\s*\(([^()]*)\)\s*", rest)
    return parse_unit(rest) if remark is None else parse_unit(f" {remark[1].strip()}", known=True)


def _range(text: str, difference: Number) -> Reading:
    """Reads `5-10` without spaces, which may be a range or a score."""
    ends = _RANGE.fullmatch(text)
    if ends is None:
        return difference
    meanings = (f"the range {ends[1]} to {ends[2]}", f"the number {difference.value}")
    return Ambiguous(meanings, (Text(letters(text.replace("-", " to ", 1))), difference), _RANGE_REMEDY)


def _compound(value: Fraction, rest: str) -> Reading | None:
    """Reads a sum of two quantities of the same kind, such as `2 h 30 min` or `30°15'`."""
    cut = re.search(r"(?:(?<=[a-z°'\u4e00-\u9fff])\s*|[\s,]+(?:and\s+)?)(?=\d)", rest) if len(rest) < 60 else None
    first = parse_unit(rest[: cut.start()]) if cut else None
    second = _quantity(rest[cut.end() :]) if cut and first else None
    if first is None or not isinstance(second, Number) or second.unit is None:
        return None
    factor = next(iter(first.factors(second.unit)), Fraction(0))
    smaller = second.value / factor if factor > 1 else None
    return None if smaller is None else Number(value + (smaller if value >= 0 else -smaller), first)


def _is_sum_of_units(text: str) -> bool:
    """Whether a text with `and` is one quantity and no list, such as `2 hours and 30 minutes`."""
    return " and " in text and text[0].isdigit() and isinstance(_quantity(text), Number)


def _rest(text: str, plain: str) -> Reading:
    """Reads a code such as `B12`, a name, or a formula with its unit."""
    coded = re.search(r"[^\W\d_]{3}|^[^\W\d_]+\d|\d_", plain) and not re.search(r"[\\^=+*/<>|]", plain)
    if coded or not plain or re.search(r"[\x00-\x1f]", plain):
        return Text(letters(plain))
    if _NAMES.fullmatch(plain):
        return Text(letters(re.sub(r"\\overline(?![A-Za-z])|[{}]", "", plain)))
    in_function = text.endswith("°") and _TRIGONOMETRIC.search(text)
    behind = None if in_function else _UNIT_AT_END.search(text)
    unit = parse_unit(behind[0], known=True) if behind and behind.start() else None
    latex = text[: behind.start()].strip() if behind and unit else text
    return Formula(re.sub(r"\\text\{(\w)\}", r"\1", latex), unit)
