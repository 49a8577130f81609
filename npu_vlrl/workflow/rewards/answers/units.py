"""Units, currencies and counted things behind a number: decides which are the same, and computes their factor.

A unit is a product of bases, so that `km/h`, `m s^{-1}` and `meters per second` compare, with a factor to these bases.
A word that no table has is a base of its own: five apples are not five pears. Some names have several meanings (a
pound is money or a mass), and units are the same when one meaning of each is.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from npu_vlrl.workflow.rewards.answers.unit_table import PLAIN, PREFIXES, SCALED

Bases = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Meaning:
    bases: Bases
    factor: Fraction


@dataclass(frozen=True)
class Unit:
    """A unit with all its meanings, e.g. `parse_unit("km/h")`: one meaning, {m: 1, s: -1} with the factor 5/18."""

    meanings: tuple[Meaning, ...]

    def factors(self, other: Unit) -> list[Fraction]:
        """Factors of the meanings that both units share: number of `other` in one of this; empty if different."""
        pairs = product(self.meanings, other.meanings)
        return [mine.factor / yours.factor for mine, yours in pairs if mine.bases == yours.bases]


Names = dict[str, tuple[Meaning, ...]]

PERCENT = Unit((Meaning(frozenset({("%", 1)}), Fraction(1)),))
DEGREE = Meaning(frozenset({("°", 1)}), Fraction(1))
RADIAN = Meaning(frozenset({("rad", 1)}), Fraction(1))

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8}
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3}
_POWERED = {"squared": 2, "cubed": 3}
_PER = ("per", "a", "an", "each")
_PHRASES = (
    re.compile(
        r"(?:°|(?:\\text\{\s*)?degrees?)\s*(?:\}\s*)?(?:\\text\{\s*)?([CFK](?:elsius|ahrenheit|elvin)?)\b\s*\}?"
    ),
    re.compile(r"(?:\\text\{\s*)?\bper cent\b\s*\}?"),
    re.compile(r"\\frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}"),
)
_BARE = frozenset("mgshLl")
"""Letters that are units without further evidence. Others, `t` or `d`, are variables unless they stand upright."""

CURRENCY = re.compile(r"(?:US)?\$|[€£¥₹₩]|(?:USD|EUR|GBP|CNY|RMB|JPY|INR|Rs\.?)(?=[\s\d])")
_TOKEN = re.compile(
    r"\\text\{(?P<text>[^{}]*)\}|\^\s*\{?\s*(?P<power>[-+]?\d)\s*\}?|"
    r"(?P<sign>°\s*(?:[CFK](?:elsius|ahrenheit|elvin)?(?![A-Za-z]))?|[%¢'\"]|(?:US)?\$|[€£¥₹₩])|(?P<word>[^\W\d_\u4e00-\u9fff]+\.?)|(?P<cjk>[\u4e00-\u9fff]+)|(?P<operator>/|\\cdot|\\times|\*|-|\\mu)|(?P<space>\s+)"
)


def parse_unit(text: str, *, known: bool = False) -> Unit | None:
    """Parses `text` as one unit; None if it is none. With `known`, words outside of the table are refused."""
    temperature, percent, fraction = _PHRASES
    text = re.sub(r"(?<=[a-z])([23])(?![\w.])", r"^\1", text)  # cm2
    tokens = _tokens(temperature.sub(r"°\1", percent.sub("%", fraction.sub(r"\1/\2", text))), roman=False)
    if not tokens or tokens[0][0] != "word" or tokens[-1][0] == "operator":
        return None
    spaced = text[0].isspace() or text.startswith("\\")
    unit = Unit((Meaning(frozenset(), Fraction(1)),))
    ahead, sign = 1, 1
    i = 0
    while i < len(tokens):
        kind, word, roman = tokens[i]
        i += 1
        if kind == "operator":
            if word == "/":
                sign = -1
            continue
        if kind != "word":
            return None
        if word in _POWERS and i < len(tokens):
            ahead = _POWERS[word]
            continue
        found = _lookup(word, spaced or roman or i > 1, roman, known)
        if found is None:
            return None
        power = ahead * sign
        if i < len(tokens) and tokens[i][0] == "power":
            power *= int(tokens[i][1])
            i += 1
        elif i < len(tokens) and tokens[i][1] in _POWERED:
            power *= _POWERED[tokens[i][1]]
            i += 1
        meanings = (_product(old, 1, new, power) for old, new in product(unit.meanings, found.meanings))
        unit, ahead = Unit(tuple(meanings)[:8]), 1
    return unit


def scale(text: str) -> tuple[int, str]:
    """Power of ten of a word such as `million` at the beginning of `text`, and the rest."""
    word = re.match(r"\s*(?:\\text\{)?\s*([A-Za-z]+|万|亿)", text)
    places = _SCALES.get(word[1].casefold(), 0) if word else 0
    if word is None or not places:
        return 0, text
    rest = text[word.end() :]
    return places, ("\\text{" + rest if "{" in word[0] and not rest.startswith("}") else rest.removeprefix("}"))


def _tokens(text: str, roman: bool) -> list[tuple[str, str, bool]]:
    """Tokens (kind, word, upright) of a text; empty when some part belongs to no unit."""
    tokens: list[tuple[str, str, bool]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return []
        at = match.end()
        kind = str(match.lastgroup)
        if kind == "text":
            inner = _tokens(match["text"], roman=True)
            if not inner:
                return []
            tokens += inner
        elif kind == "power":
            tokens.append(("power", match["power"], roman))
        elif kind == "cjk":
            tokens += [
                ("operator", "/", roman) if word in "每" else ("word", word, roman) for word in _split(match["cjk"])
            ]
        elif kind == "sign" or (kind == "operator" and match[0] == "\\mu"):
            tokens.append(("word", re.sub(r"\s", "", match[0]).replace("\\mu", "μ"), roman))
        elif kind == "word" and match["word"].casefold() in _PER and tokens:
            tokens.append(("operator", "/", roman))
        elif kind != "space":
            tokens.append((kind, match[0].removesuffix("."), roman))
    return tokens


def _split(chinese: str) -> list[str]:
    """Splits Chinese text, which has no spaces, into the longest names of the table; any other text is one word."""
    words = []
    while chinese:
        size = next((n for n in range(len(chinese), 0, -1) if _name(chinese[:n])), len(chinese))
        words.append(chinese[:size])
        chinese = chinese[size:]
    return words


def _name(word: str) -> bool:
    return word in _WORDS or word in _POWERS or word == "每"


def _lookup(word: str, spaced: bool, roman: bool, known: bool) -> Unit | None:
    if len(word) == 1 and word.isascii() and word.isalpha():
        allowed = roman or word in _BARE or (spaced and word.isupper())
        return Unit(_SYMBOLS[word]) if allowed and word in _SYMBOLS else None
    folded = word.casefold()
    plural = word.removesuffix("s") if len(word) > 2 else word
    names = (
        (_SYMBOLS, word),
        (_WORDS, folded),
        (_WORDS, folded.removesuffix("s")),
        (_SYMBOLS, plural),
        (_FOLDED, folded),
    )
    for table, name in names:
        if name in table:
            return Unit(table[name])
    if known or (word.isascii() and (len(word) < 3 or not spaced)):
        return None
    return Unit((Meaning(frozenset({(_singular(folded), 1)}), Fraction(1)),))


def _singular(word: str) -> str:
    irregular = {"children": "child", "men": "man", "women": "woman", "mice": "mouse", "feet": "foot"}
    if re.search(r"..ies?$", word):
        return re.sub(r"ies?$", "y", word)
    if re.search(r"(?:s|x|z|ch|sh|o)es$", word):
        return word[:-2]
    return irregular.get(word) or (word[:-1] if word.endswith("s") and not word.endswith("ss") else word)


def _product(one: Meaning, power: int, other: Meaning, its_power: int) -> Meaning:
    bases: Counter[str] = Counter()
    for base, exponent in one.bases:
        bases[base] += exponent * power
    for base, exponent in other.bases:
        bases[base] += exponent * its_power
    kept = frozenset((base, exponent) for base, exponent in bases.items() if exponent)
    return Meaning(kept, one.factor**power * other.factor**its_power)


def _bases(text: str) -> Bases:
    parts = (part.partition("^") for part in text.split("/") if part)
    return frozenset((name, int(exponent or 1) * (-1) ** i) for i, (name, _, exponent) in enumerate(parts))


def _rows(table: str) -> Iterator[tuple[list[str], list[str], Meaning]]:
    for line in table.strip().split("\n"):
        symbols, words, bases, factor = (cell.strip() for cell in line.split("|"))
        yield symbols.split(), words.split(), Meaning(_bases(bases), Fraction(factor))


def _tables() -> tuple[Names, Names]:
    """Meanings of units by symbol and by word."""
    symbols: Names = defaultdict(tuple)
    words: Names = defaultdict(tuple)
    for its_symbols, its_words, meaning in (*_rows(PLAIN), *_rows(SCALED)):
        for names, table in ((its_symbols, symbols), (its_words, words)):
            for name in names:
                table[name] += (meaning,)
    for (letter, latin, chinese, factor), (its_symbols, its_words, meaning) in product(PREFIXES, list(_rows(SCALED))):
        scaled = Meaning(meaning.bases, meaning.factor * Fraction(factor))
        for name in its_symbols:
            symbols[letter + name] += (scaled,)
        for name in its_words:
            long = (latin if name.isascii() else chinese) + name
            if long not in words:
                words[long] += (scaled,)
    return dict(symbols), dict(words)


_SYMBOLS, _WORDS = _tables()
_FOLDED = {name.casefold(): meanings for name, meanings in reversed(_SYMBOLS.items()) if len(name) > 1}
