"""Units, currencies and counted things behind a number: which are the same, and by which factor they differ.

A unit is a product of bases, so that `km/h`, `m s^{-1}` and `meters per second` compare, with a factor to these bases. A
word that no table has is a base of its own: five apples are not five pears. Some names have several meanings (a pound
is money or a mass), and units are the same when one meaning of each is.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

Bases = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Meaning:
    bases: Bases
    factor: Fraction


@dataclass(frozen=True)
class Unit:
    """Example: `parse_unit("km/h", roman=False)` has one meaning, {m: 1, s: -1} with the factor 5/18."""

    meanings: tuple[Meaning, ...]

    def factors(self, other: Unit) -> list[Fraction]:
        """For each meaning that both share: how many of `other` are one of this; empty for different units."""
        pairs = itertools.product(self.meanings, other.meanings)
        return [mine.factor / yours.factor for mine, yours in pairs if mine.bases == yours.bases]

    def times(self, other: Unit) -> Unit:
        pairs = itertools.product(self.meanings, other.meanings)
        return Unit(tuple(_product(mine, 1, yours, 1) for mine, yours in pairs))


PERCENT = Unit((Meaning(frozenset({("%", 1)}), Fraction(1)),))
DEGREE = Meaning(frozenset({("°", 1)}), Fraction(1))

_PREFIXES = (
    "n nano 1e-9|u micro 1e-6|μ micro 1e-6|m milli 1e-3|c centi 1e-2|d deci 1e-1|k kilo 1e3|M mega 1e6|G giga 1e9"
)
_SCALED = """m meter,metre,米 m 1|g gram,gramme,克 g 1|L liter,litre,升 m^3 1e-3|l - m^3 1e-3|s second,sec,秒 s 1
W watt,瓦 W 1|J joule,焦耳,焦 J 1|N newton,牛顿,牛 N 1|Pa pascal,帕 Pa 1|V volt,伏特,伏 V 1|A ampere,amp,安培,安 A 1
Hz hertz,赫兹 Hz 1|Ω ohm,欧姆 Ω 1|F farad F 1|C coulomb C 1|mol mole,摩尔 mol 1|cal calorie cal 1|eV electronvolt eV 1|B byte B 1"""
_PLAIN = """min minute,分钟,分 s 60|h,hr hour,小时 s 3600|- day,天,日 s 86400|- week,周 s 604800|- month,个月 month 1
yr year,年 month 12|in inch,inche,英寸 m 0.0254|ft foot,feet,英尺 m 0.3048|yd yard,码 m 0.9144|mi mile,英里 m 1609.344
- 公里 m 1000|- 公斤 g 1000|- 里 m 500|- 斤 g 500|- 亩 亩 1|- 吨,tonne g 1000000|t - g 1000000|- ton ton 1|- ton g 1000000
lb,lbs pound,磅 lb 1|oz ounce lb 0.0625|ha hectare,公顷 m^2 10000|- acre acre 1|gal gallon gal 1|- quart gal 0.25
mph - m/s 0.44704|kmh,kph,kmph - m/s 5/18|rad radian,弧度 rad 1|° degree,deg,度 ° 1|° degree,度 °C 1|° degree,度 °F 1
°C,C,°Celsius celsius,摄氏度 °C 1|°F,F,°Fahrenheit fahrenheit,华氏度 °F 1|K,°K,°Kelvin kelvin °K 1|atm atmosphere atm 1|- person,people,人 人 1
$,USD,US$ dollar,buck,美元 USD 1|€,EUR euro,欧元 EUR 1|£,GBP pound,pounds sterling,英镑 GBP 1|¥,CNY,RMB yuan,元,块,人民币 CNY 1
¥,JPY yen,日元 JPY 1|₹,INR,Rs rupee,卢比 INR 1|₩,KRW won KRW 1|¢ cent USD 0.01|- cent EUR 0.01|- 角 CNY 0.1|- dozen dozen 1
- penny,pence,pennie GBP 0.01|- penny,pennie USD 0.01|%,pct percent,percentage % 1|- unit,单位,个,只,本,条,张,名,位,件 - 1"""
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
"""Letters that are units where nothing says so. Others, `t` or `d`, are variables unless they stand upright."""

CURRENCY = re.compile(r"(?:US)?\$|[€£¥₹₩]|(?:USD|EUR|GBP|CNY|RMB|JPY|INR|Rs\.?)(?=[\s\d])")
_TOKEN = re.compile(
    r"\\text\{(?P<text>[^{}]*)\}|\^\s*\{?\s*(?P<power>[-+]?\d)\s*\}?|(?P<sign>°\s*(?:[CFK](?:elsius|ahrenheit|elvin)?(?![A-Za-z]))?|[%¢Ω]|(?:US)?\$|"
    r"[€£¥₹₩])|(?P<word>[A-Za-z]+\.?)|(?P<cjk>[\u4e00-\u9fff]+)|(?P<operator>/|\\cdot|\\times|\*|-|\\mu|\\Omega)|(?P<space>\s+)"
)


def parse_unit(text: str, *, known: bool = False) -> Unit | None:
    """The unit that all of `text` is, or None. With `known`, words that no table has are none. See `normalise`."""
    temperature, percent, fraction = _PHRASES
    tokens = _tokens(temperature.sub(r"°\1", percent.sub("%", fraction.sub(r"\1/\2", text))), roman=False)
    if not tokens or tokens[0][0] != "word" or tokens[-1][0] == "operator":
        return None
    spaced = text[0].isspace() or text.startswith("\\")
    product: Unit = Unit((Meaning(frozenset(), Fraction(1)),))
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
        meanings = (_product(old, 1, new, power) for old, new in itertools.product(product.meanings, found.meanings))
        product, ahead = Unit(tuple(meanings)[:8]), 1
    return product


def scale(text: str) -> tuple[int, str]:
    """The power of ten that a word such as `million` at the beginning of `text` stands for, and the rest."""
    word = re.match(r"\s*(?:\\text\{)?\s*([A-Za-z]+|万|亿)", text)
    places = _SCALES.get(word[1].casefold(), 0) if word else 0
    if word is None or not places:
        return 0, text
    rest = text[word.end() :]
    return places, ("\\text{" + rest if "{" in word[0] and not rest.startswith("}") else rest.removeprefix("}"))


def _tokens(text: str, roman: bool) -> list[tuple[str, str, bool]]:
    """(kind, word, upright); empty when something is no part of a unit."""
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
        elif kind == "sign" or (kind == "operator" and match[0] in ("\\mu", "\\Omega")):
            tokens.append(("word", re.sub(r"\s", "", match[0]).replace("\\mu", "μ").replace("\\Omega", "Ω"), roman))
        elif kind == "word" and match["word"].casefold() in _PER and tokens:
            tokens.append(("operator", "/", roman))
        elif kind != "space":
            tokens.append((kind, match[0].removesuffix("."), roman))
    return tokens


def _split(chinese: str) -> list[str]:
    """Chinese has no spaces: the longest names that the table has; else the rest is one word."""
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
    for table, name in ((_SYMBOLS, word), (_WORDS, folded), (_WORDS, folded.removesuffix("s")), (_FOLDED, folded)):
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
    if text == "-":
        return frozenset()
    parts = (part.partition("^") for part in text.split("/"))
    return frozenset((name, int(exponent or 1) * (-1) ** i) for i, (name, _, exponent) in enumerate(parts))


def _tables() -> tuple[dict[str, tuple[Meaning, ...]], dict[str, tuple[Meaning, ...]]]:
    symbols: dict[str, tuple[Meaning, ...]] = {}
    words: dict[str, tuple[Meaning, ...]] = {}

    def enter(table: dict[str, tuple[Meaning, ...]], name: str, meaning: Meaning) -> None:
        if name != "-":
            table[name] = (*table.get(name, ()), meaning)

    def entries(text: str) -> list[tuple[list[str], list[str], Meaning]]:
        rows = [row.rsplit(" ", 2) for row in text.replace("\n", "|").split("|")]
        return [
            (names.split(" ", 1)[0].split(","), names.split(" ", 1)[-1].split(",") if " " in names else [],
             Meaning(_bases(bases), Fraction(factor)))
            for names, bases, factor in rows
        ]  # fmt: skip

    for its_symbols, its_words, meaning in entries(_PLAIN + "|" + _SCALED.replace("\n", "|")):
        for name in its_symbols:
            enter(symbols, name, meaning)
        for name in its_words:
            enter(words, name, meaning)
    chinese = {"k": "千", "m": "毫", "c": "厘", "d": "分", "μ": "微", "n": "纳", "M": "兆"}
    for prefix in _PREFIXES.split("|"):
        letter, word, factor = prefix.split()
        for its_symbols, its_words, meaning in entries(_SCALED):
            scaled = Meaning(meaning.bases, meaning.factor * Fraction(factor))
            for name in its_symbols:
                enter(symbols, letter + name, scaled)
            for name in its_words:
                ahead = word if name.isascii() else chinese.get(letter)
                if ahead and name != "-" and ahead + name not in words:
                    enter(words, ahead + name, scaled)
    return symbols, words


_SYMBOLS, _WORDS = _tables()
_FOLDED = {name.casefold(): meanings for name, meanings in reversed(_SYMBOLS.items()) if len(name) > 1}
