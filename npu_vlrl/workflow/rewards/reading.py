"""The plain reading of a short answer: a word, an option's letter, an exact number with its unit, a tuple, a formula.

Gold and answer are read by the same rules. `same` compares two readings: words by their letters in order, numbers by
their exact values, groups by their elements; only formulas are handed to the caller, who has math-verify for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from npu_vlrl.workflow.rewards.choices import option
from npu_vlrl.workflow.rewards.exact import TwoReadings, exact, exact_prefix
from npu_vlrl.workflow.rewards.normalise import normalise, without_fonts
from npu_vlrl.workflow.rewards.units import CURRENCY, DEGREE, PERCENT, Unit, parse_unit, scale

LONGEST = 2000
"""Characters of an answer that is read; a longer one is compared by its characters."""

_MAX_NESTING = 20
_MAX_ITEMS = 200


@dataclass(frozen=True)
class Text:
    """Words, by their letters alone: without spaces, case, quotes and a full stop."""

    letters: str


@dataclass(frozen=True)
class Option:
    """A choice's letter, or a variable, and what stands after it."""

    letter: str
    rest: str


@dataclass(frozen=True)
class Number:
    value: Fraction
    unit: Unit | None = None

    @property
    def latex(self) -> str:
        above, below = self.value.numerator, self.value.denominator
        return str(above) if below == 1 else f"{'-' if above < 0 else ''}\\frac{{{abs(above)}}}{{{below}}}"


@dataclass(frozen=True)
class Formula:
    latex: str
    unit: Unit | None = None


@dataclass(frozen=True)
class Group:
    """`brackets` are `()`, `[)`, `{}` and so on, or none for a bare list, whose order does not count."""

    brackets: str
    items: tuple[Reading, ...]


@dataclass(frozen=True)
class Labelled:
    """`x = 5`: a value with what it is the value of."""

    label: str
    value: Reading
    latex: str


@dataclass(frozen=True)
class Ambiguous:
    """A text with several plain readings: in words, and those of them that can be compared."""

    meanings: tuple[str, ...]
    options: tuple[Reading, ...]
    remedy: str

    def refusal(self, gold: str) -> str:
        return f"the gold answer {gold[:80]!r} can be read as {' or as '.join(self.meanings)}; {self.remedy}"


Reading = Text | Option | Number | Formula | Group | Labelled | Ambiguous
Formulas = Callable[[Formula, Formula], bool]
"""Whether the second formula, an answer's, is the same mathematics as the first, a gold's; units are compared before."""


def read(text: str) -> Reading:
    """The reading of a gold or of an answer, which may be anything. Bounded by `LONGEST`, linear beyond it."""
    if len(text) > LONGEST:
        return Text(_letters(text))
    return _read(normalise(text), 0, decimal_comma=False)


def same(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    """Whether `answer` is right where `gold` is. Of an ambiguous answer one of its readings is enough.

    A unit that one side leaves out is no difference, nor is the name of a variable (`x = 5` and `5`).
    """
    if isinstance(answer, Ambiguous):
        return any(same(gold, option, formulas) for option in answer.options)
    if isinstance(gold, Ambiguous):
        return any(same(option, answer, formulas) for option in gold.options[:1])
    if isinstance(gold, Labelled) or isinstance(answer, Labelled):
        return _same_labelled(gold, answer, formulas)
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_group(gold, answer, formulas)
    if isinstance(gold, Text) or isinstance(answer, Text):
        return _same_text(gold, answer, formulas)
    if isinstance(gold, Option) or isinstance(answer, Option):
        return _same_option(gold, answer, formulas)
    return _same_quantity(gold, answer, formulas)


def quantity(text: str) -> Number | None:
    """The number, with its unit, that all of `text` is: also as `x = 5` or with a decimal comma. None for others."""
    reading = read(text)
    if isinstance(reading, Labelled):
        reading = reading.value
    if isinstance(reading, Ambiguous):
        reading = next((option for option in reading.options if isinstance(option, Number)), reading)
    return reading if isinstance(reading, Number) else None


def same_plain(gold: str, answer: str) -> bool:
    """As `same` without math-verify: formulas must be written alike. Linear in the texts."""
    return same(read(gold), read(answer), lambda one, other: False)


def _read(text: str, depth: int, decimal_comma: bool) -> Reading:
    plain = without_fonts(text)
    if depth > _MAX_NESTING:
        return Text(_letters(plain))
    choice = option(plain)
    if choice is not None:
        return Option(*choice)
    if _is_words(plain):
        return Text(_letters(plain))
    items = _list(text, decimal_comma)
    if isinstance(items, Ambiguous):
        return items
    if len(items) > 1:
        return Group("", tuple(_read(item, depth + 1, ";" in text) for item in items[:_MAX_ITEMS]))
    parts = _split(text, ("\\approx",))
    if len(parts) > 1 and all(part.strip() for part in parts[1:]):
        options = [_read(part.strip(), depth + 1, decimal_comma) for part in parts if part.strip()]
        return (
            options[0] if len(options) == 1 else Ambiguous(tuple(parts), tuple(options), "write the exact value alone")
        )
    labelled = _labelled(text, depth, decimal_comma)
    if labelled is not None:
        return labelled
    if re.search(r"\\pm(?![A-Za-z])", text):
        upper, lower = (
            re.sub(r"\\mp(?![A-Za-z])", other, re.sub(r"\\pm(?![A-Za-z])", sign, text)) for sign, other in ("+-", "-+")
        )
        return Group(
            "", tuple(_read(side.removeprefix("+").strip(), depth + 1, decimal_comma) for side in (upper, lower))
        )
    return _group(text, depth) or _quantity(text) or _rest(text, plain)


_NAMES = re.compile(
    r"(?:[A-Za-z\s{}',]|\\(?:angle|triangle|overline|overrightarrow|overleftrightarrow|vec|bar|hat|odot|parallel|perp|cong|sim|to"
    r"|rightarrow)(?![A-Za-z]))+|(?:[A-Z][a-z]?(?:_\s*(?:\{\w+\}|\w))?)+"
)
"""Names of figures, `\\triangle ABC`, of points and of substances, `H_2O`: their order counts."""


def _rest(text: str, plain: str) -> Reading:
    coded = re.search(r"[^\W\d_]{3}|^[^\W\d_]+\d|\d_", plain) and not re.search(r"[\\^=+*/<>|]", plain)
    if coded or not plain or re.search(r"[\x00-\x1f]", plain):
        return Text(_letters(plain))
    if _NAMES.fullmatch(plain):
        return Text(re.sub(r"[{}\s]", "", plain))
    unit_at = None if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text) and text.endswith("°") else _formula_unit(text)
    unit = None if unit_at is None else parse_unit(text[unit_at:], known=True)
    return Formula(re.sub(r"\\text\{(\w)\}", r"\1", text[:unit_at].strip() if unit else text), unit)


def _is_words(plain: str) -> bool:
    """Two letters or more and nothing that computes; `x-y`, `f(x)` and `y'` do."""
    if not re.search(r"[^\W\d_].*[^\W\d_]|[^\W\d_\x00-\x7f]", plain) or re.search(r"[\d\\^_=+*/<>|{}%$°&~@#]", plain):
        return False
    runs = re.findall(r"[^\W\d_]+", plain)
    if re.search(r"[-()\[\]']", plain) and any(len(run) == 1 and run.isascii() for run in runs):
        return bool(re.search(r"\w\w'\w", plain)) and not re.search(r"[-()\[\]]", plain)
    return len(runs) < 2 or not _lettered(plain)


def _lettered(plain: str) -> bool:
    """A list of single letters, `A, B` or `x and y`, whose order does not count."""
    return bool(re.fullmatch(r"\s*[A-Za-z](?:\s*(?:,|;|\band\b|\bor\b|&)+\s*[A-Za-z])+\s*", plain))


def _letters(text: str) -> str:
    return re.sub(r"[\s\"'`]+", "", text).rstrip(".,;!").casefold()


def _same_text(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    """Letter by letter. A name of two or three letters is also the product that a formula writes with signs."""
    if isinstance(gold, Text) and isinstance(answer, Text):
        return gold.letters == answer.letters
    text, other = (gold, answer) if isinstance(gold, Text) else (answer, gold)
    assert isinstance(text, Text)
    if isinstance(other, Formula):
        if _letters(without_fonts(other.latex)) == text.letters:
            return True
        if other.unit is None and re.fullmatch(r"[a-z]{2,3}", text.letters) and "cdot" in other.latex:
            product = Formula(" ".join(text.letters))
            return formulas(product, other) if text is gold else formulas(other, product)
    return False


_DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{4}|\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?m\.?)?", re.IGNORECASE
)


def _quantity(text: str) -> Reading | None:
    """A number, its currency before it and its unit after it; None for anything else."""
    if _DATE.fullmatch(text):
        return Text(_letters(text))
    money = re.match(rf"([-+]?)\s*({CURRENCY.pattern})\s*([-+]?)(?=[\s\d.\\])", text)
    body = text if money is None else f"{money[1]}{money[3]}{text[money.end() :].lstrip()}"
    currency = None if money is None else parse_unit(money[2].rstrip("."))
    try:
        whole = exact(body)
        parsed = exact_prefix(body) if whole is None else None
    except TwoReadings as readings:
        return Ambiguous(tuple(map(str, readings.args)), (), "write it with its sign, \\cdot or +, or with a comma")
    if whole is not None:
        return Number(whole, currency)
    if parsed is None:
        return None
    places, rest = scale(body[parsed.end :])
    value = parsed.value * 10**places
    unit = parse_unit(rest) if rest.strip() else None
    if unit is None and rest.strip():
        return _compound(value, rest)
    if currency is not None and unit is not None and not currency.factors(unit):
        unit = currency.times(unit)
    return Number(value, unit or currency)


def _compound(value: Fraction, rest: str) -> Reading | None:
    """`2 h 30 min`: a smaller quantity of the same kind added."""
    cut = re.search(r"[\s,]+(?:and\s+)?(?=\d)", rest) if len(rest) < 60 else None
    first = parse_unit(rest[: cut.start()]) if cut else None
    second = _quantity(rest[cut.end() :]) if cut and first else None
    if first is None or not isinstance(second, Number) or second.unit is None:
        return None
    factor = next(iter(first.factors(second.unit)), Fraction(0))
    smaller = second.value / factor if factor > 1 else None
    return None if smaller is None else Number(value + (smaller if value >= 0 else -smaller), first)


def _formula_unit(text: str) -> int | None:
    """Where the unit behind a formula begins, if there may be one: at most two words and their powers."""
    found = re.search(
        r"(?<=[\s}\d)])(?:\s*(?:\\text\{[^{}]*\}|(?<![A-Za-z\\])[A-Za-z]{2,}|[°%]|[\u4e00-\u9fff]+|[/*]|\\cdot)\s*"
        r"(?:\^\s*(?:\{-?\d\}|-?\d))?){1,6}$",
        text,
    )
    return found.start() if found and found.start() else None


_COMMA_REMEDY = "write a decimal point (1.5), a space after the comma of a list (1, 5), or no separator of thousands"


def _list(text: str, decimal_comma: bool) -> list[str] | Ambiguous:
    """The elements of a bare list; a text without commas, or with commas that belong to a number, is one element."""
    parts = _split(text, (";",))
    if len(parts) == 1 and not decimal_comma:
        words = _split(text, (" and ", " or ", "\\text{and}", "\\text{or}", "\\text{ and }", "\\text{ or }", "，"))
        parts = [part for word in words for part in _split_commas(word)]
    items = [part.strip() for part in parts if part.strip()]
    if len(items) > 1 and text.count(",") == len(items) - 1 and not re.search(r",\s", text):
        return _one_number(text, items) or items
    return items or [text]


def _split_commas(text: str) -> list[str]:
    """At the commas with a space after them, if there is one; else at all that do not separate thousands."""
    return [text] if _THOUSANDS.fullmatch(text.strip()) else _separated(text)


def _separated(text: str) -> list[str]:
    spaced = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "\ue001", text) if re.search(r",\s", text) else text
    return [part.replace("\ue001", ",") for part in _split(spaced, (",",))]


_AROUND = r"[-+]?\s*(?:(?:US)?[$€£¥]\s*)?", r"(?:\s*(?:[^\W\d_]|[°%$€£¥/^{}\\.]|(?<=[\^{])-?\d)*)*"
_THOUSANDS = re.compile(_AROUND[0] + r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?(?![\d,])[^,]*", re.DOTALL)
_EUROPEAN = re.compile(_AROUND[0] + r"\d{1,3}(?:(?:\.\d{3}){2,}|(?: \d{3})+),\d+")
_DECIMAL = re.compile(_AROUND[0] + r"(?:\d+|\d{1,3}(?:\.\d{3})+)")
_INDIAN = re.compile(r"[-+]?\d{1,2}(?:,\d{2})+,\d{3}")
_FRACTIONAL = re.compile(r"(\d+)(?:[eE][-+]?\d+)?(?![\d.,^/:(\[])([^,(\[]*)")


def _one_number(text: str, items: Sequence[str]) -> Ambiguous | list[str] | None:
    """What commas without a space after them separate: the elements of a list, the decimals of a number, or unclear."""
    if _EUROPEAN.fullmatch(text):
        return [text]
    number: Reading | None = None
    if _INDIAN.fullmatch(text):
        number = Number(Fraction(text.replace(",", "")))
    elif len(items) == 2 and _DECIMAL.fullmatch(items[0]) and (tail := _FRACTIONAL.fullmatch(items[1])):
        if not tail[2].strip() or parse_unit(tail[2]) is not None:
            number = _quantity(text)
    if not isinstance(number, Number):
        return None
    listed = Group("", tuple(_read(item, 1, decimal_comma=False) for item in items))
    return Ambiguous(
        (f"the list {', '.join(items)}", f"the number {_decimal(number)}"), (listed, number), _COMMA_REMEDY
    )


def _decimal(number: Number) -> str:
    value = number.value
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _labelled(text: str, depth: int, decimal_comma: bool) -> Reading | None:
    """`label = value`, also as a chain `x = 2 + 3 = 5`; None for an equation, which is a formula."""
    parts = [part.strip() for part in _split(text, ("=", "\\in ", "\\in{"))]
    if len(parts) < 2 or not all(parts):
        return None
    try:
        values = [value for part in parts[:-1] if (value := exact(part)) is not None]
        last = exact(parts[-1])
    except TwoReadings:
        return None
    if _is_label(parts[0]):
        name, chain = _letters(without_fonts(parts[0])).replace("m\\angle", "\\angle"), parts[1:-1]
    elif len(values) == len(parts) - 1 and _is_label(parts[-1]):
        return _labelled("=".join((parts[-1], *parts[:-1])), depth, decimal_comma)
    else:
        name, chain = "", parts[:-1]
        if len(values) < len(chain) or last is None:
            return None
    if last is not None and any(value != last for value in values):
        return Text(_letters(text))  # a chain that contradicts itself is no number
    value = _read(parts[-1], depth + 1, decimal_comma)
    return Labelled(name, value, text) if name else value


def _is_label(text: str) -> bool:
    plain = re.sub(r"_\s*(?:\{[^{}]*\}|\w)", "", without_fonts(text))
    plain = re.sub(
        r"\\(?:angle|triangle|overline|overrightarrow|vec|bar|hat|measuredangle|[A-Za-z]*[Dd]elta)", "", plain
    )
    plain = re.sub(r"\\(?:alpha|beta|gamma|theta|phi|lambda|mu|rho|sigma|omega)\s*", "a", plain)
    return len(plain) <= 40 and bool(
        re.fullmatch(r"[\s{}]*[^\W\d_][^\W\d_\s{}'.]*(?:[\s{}'.]*[^\W\d_]*)*(?:\([\w\s,]*\))?[\s{}]*", plain)
    )


def _group(text: str, depth: int) -> Reading | None:
    """A tuple, set or interval: brackets around all of the text with commas or semicolons within."""
    opening = next((mark for mark in ("\\{", "(", "[", "⟨") if text.startswith(mark)), None)
    closing = next((mark for mark in ("\\}", ")", "]", "⟩") if text.endswith(mark)), None)
    if opening is None or closing is None or len(text) <= len(opening) + len(closing):
        return None
    inner = text[len(opening) : -len(closing)]
    if not _balanced(inner):
        return None
    semicolons = _split(inner, (";",))
    parts = [part.strip() for part in (semicolons if len(semicolons) > 1 else _separated(inner))]
    brackets = opening.strip("\\") + closing.strip("\\")
    if len(parts) < 2 and brackets == "()":
        return _read(inner.strip(), depth + 1, decimal_comma=False)
    if (len(parts) < 2 and brackets not in ("{}", "[]")) or not all(parts):
        return None
    return Group(brackets, tuple(_read(part, depth + 1, len(semicolons) > 1) for part in parts[:_MAX_ITEMS]))


def _balanced(text: str) -> bool:
    depth = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth += 1 if bracket in "([{" else -1
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, separators: Sequence[str]) -> list[str]:
    """`text` cut at separators outside of all brackets. `{,}`, `<=`, `!=` and `\\ne` are none."""
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


def _same_labelled(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    if isinstance(gold, Labelled) and isinstance(answer, Labelled):
        if gold.label == answer.label:
            return same(gold.value, answer.value, formulas)
        both = isinstance(gold.value, Formula) or isinstance(answer.value, Formula)
        return both and formulas(Formula(gold.latex), Formula(answer.latex))
    value = gold.value if isinstance(gold, Labelled) else gold
    if isinstance(gold, Labelled) and isinstance(answer, Formula) and "=" in answer.latex:
        return formulas(Formula(gold.latex), answer)
    return same(value, answer.value if isinstance(answer, Labelled) else answer, formulas)


def _same_group(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    mine = gold if isinstance(gold, Group) else Group("", (gold,))
    yours = answer if isinstance(answer, Group) else Group("", (answer,))
    kinds = {mine.brackets, yours.brackets}
    if len(kinds) == 2 and "" not in kinds:
        return False
    if not isinstance(gold, Group) or not isinstance(answer, Group):  # one value is the set of it alone
        return (
            kinds == {"", "{}"} and len(mine.items) == len(yours.items) and _each_has(mine.items, yours.items, formulas)
        )
    named = [isinstance(item, Labelled) for item in (*mine.items, *yours.items)]
    ordered = bool(kinds - {"", "{}"}) or (any(named) and not all(named))
    if ordered:
        pairs = zip(mine.items, yours.items, strict=False)
        return len(mine.items) == len(yours.items) and all(same(one, other, formulas) for one, other in pairs)
    if kinds == {""}:
        return len(mine.items) == len(yours.items) and _each_has(mine.items, yours.items, formulas, once=True)
    return _each_has(mine.items, yours.items, formulas)


def _each_has(gold: Sequence[Reading], answer: Sequence[Reading], formulas: Formulas, once: bool = False) -> bool:
    """Whether each element has an equal one on the other side, each used `once` or, in a set, as often as needed."""
    left = list(answer)
    for item in gold:
        at = next((i for i, other in enumerate(left) if same(item, other, formulas)), None)
        if at is None:
            return False
        if once:
            del left[at]
    return once or all(any(same(item, other, formulas) for item in gold) for other in answer)


def _same_option(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    if isinstance(gold, Option) and isinstance(answer, Option):
        return gold.letter.casefold() == answer.letter.casefold()
    letter, other = (gold, answer) if isinstance(gold, Option) else (answer, gold)
    assert isinstance(letter, Option)
    if letter.rest:
        return letter is gold and same(read(letter.rest), other, formulas)
    if isinstance(other, Formula):
        symbol = Formula(letter.letter)
        return formulas(symbol, other) if letter is gold else formulas(other, symbol)
    return False


def _same_quantity(gold: Reading, answer: Reading, formulas: Formulas) -> bool:
    assert isinstance(gold, Number | Formula) and isinstance(answer, Number | Formula)
    if isinstance(gold, Formula) and gold.unit == answer.unit and _written(gold) == _written(answer):
        return True
    factors = [Fraction(1)]
    if gold.unit is not None and answer.unit is not None:
        factors = answer.unit.factors(gold.unit)
    elif PERCENT in (gold.unit, answer.unit):
        factors.append(Fraction(1, 100) if gold.unit is None else Fraction(100))
    if isinstance(gold, Number) and isinstance(answer, Number):
        return any(gold.value == answer.value * factor for factor in factors)
    left = Formula(gold.latex)
    scaled = [
        Formula(answer.latex if factor == 1 else f"{Number(factor).latex}\\cdot({answer.latex})") for factor in factors
    ]
    if (gold.unit is None) != (answer.unit is None) and _is_degrees(gold.unit or answer.unit):
        half_turn = "\\frac{180}{\\pi}" if gold.unit is not None else "\\frac{\\pi}{180}"
        scaled.append(Formula(f"{half_turn}\\cdot({answer.latex})"))
    return any(formulas(left, right) for right in scaled)


def _written(quantity: Number | Formula) -> str:
    return re.sub(r"\s+", "", without_fonts(quantity.latex))


def _is_degrees(unit: Unit | None) -> bool:
    return unit is not None and DEGREE in unit.meanings
