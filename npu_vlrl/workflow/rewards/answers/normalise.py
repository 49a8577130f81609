"""Normalises all notations of an answer to one plain LaTeX: Unicode, fonts, spaces and equivalent delimiters.

Gold and answer both pass through `normalise`, so that both are read by the same rules. It keeps symbols with a meaning:
`{,}` stays a comma within a number, `\\text{…}` stays the mark of upright letters, `°`, `%` and `$` are units.
"""

from __future__ import annotations

import re
import unicodedata

_COMMANDS = {
    "×": "times",
    "✕": "times",
    "÷": "div",
    "·": "cdot",
    "⋅": "cdot",
    "∙": "cdot",
    "∞": "infty",
    "≤": "le",
    "≥": "ge",
    "⩽": "le",
    "⩾": "ge",
    "≠": "ne",
    "≈": "approx",
    "±": "pm",
    "∪": "cup",
    "∩": "cap",
    "∈": "in",
    "∅": "emptyset",
    "∠": "angle",
    "△": "triangle",
    "∥": "parallel",
    "⊥": "perp",
    "→": "to",
}
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho - sigma tau upsilon phi"
)
_COMMANDS |= {chr(0x3B1 + i): name for i, name in enumerate((_GREEK + " chi psi omega").split()) if name != "-"}
_COMMANDS |= {"ϕ": "phi", "ϵ": "epsilon", "ϑ": "theta", "Δ": "Delta", "Σ": "Sigma", "Φ": "Phi"}
_CHARACTERS = {character: f"\\{name} " for character, name in _COMMANDS.items()}
_CHARACTERS |= dict.fromkeys("‐‑‒–—−﹣－", "-") | dict.fromkeys("º˚∘", "°") | dict.fromkeys("“”„«»「」", '"')
_CHARACTERS |= dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "") | dict.fromkeys("‘’", "'")
_CHARACTERS |= {
    "。": ".",
    "．": ".",
    "、": ", ",
    "′": "'",
    "″": '"',
    "⁄": "/",
    "∕": "/",
    "｛": "\\{",
    "｝": "\\}",
    "【": "(",
    "】": ")",
    "₽": "₽",
}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_RAISED_RUN, _LOWERED_RUN = (re.compile(f"[{''.join(map(chr, table))}]+") for table in (_RAISED, _LOWERED))


class _Characters(dict[int, str]):
    """Table for `str.translate`, filled as characters come: one at a time, so that the time is linear."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        found = _CHARACTERS.get(character)
        if found is None:
            found = self._compatible(character)
        self[code] = found
        return found

    @staticmethod
    def _compatible(character: str) -> str:
        if character in "√…" or unicodedata.category(character) == "Cc":
            return character
        if unicodedata.category(character) == "Zs":
            return " "
        plain = unicodedata.normalize("NFKC", character)
        if "\N{FRACTION SLASH}" in plain:
            above, _, below = plain.partition("\N{FRACTION SLASH}")
            return f" \\frac{{{above}}}{{{below}}}"
        squared = re.fullmatch(r"([a-zμ]+)([23])", plain)  # of ㎡, ㎝ and their like
        return f"{squared[1]}^{{{squared[2]}}}" if squared else _CHARACTERS.get(plain, plain)


_TABLE = _Characters()
_FONTS = (
    r"\\(?:text(?:rm|bf|it|normal|sf|tt|up|md|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?(?=\s*\{(?:"
    r"[a-zA-Zμ]{1,2}|deg|mol|kcal|k?Wh|[kmMG]?Pa|[kmMG]?Hz)\})|bm|boldsymbol|pmb|emph|"
    r"underline|color\{\w+\}|textcolor\{\w+\})\s*\{([^{}]*)\}"
)
_OLD_FONTS = r"\{\s*\\(?:rm|bf|it|sf|tt)\s+([^{}]*)\}"
_STEPS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:displaystyle|textstyle|limits|nolimits|left|right|[Bb]igg?[lr]?)(?![A-Za-z])\.?", ""),
        (r",\s*\\!|\{\s*,\s*\}", "{,}"),
        (r"\\!", ""),
        (
            r"(?<!\\)\\(?:[,;:> \t\n]|quad(?![A-Za-z])|qquad(?![A-Za-z])|thinspace(?![A-Za-z])|enspace(?![A-Za-z]))|~",
            " ",
        ),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-z])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-z])", r"\1{\2}"),
        (r"∛\s*(\d+|[A-Za-z]|\{)", lambda root: f"\\sqrt[3]{{{root[1]}" + "}" * (root[1] != "{")),
        (r"\\Omega(?![A-Za-z])", "Ω"),
        (r"(?<![A-Za-z\\])sqrt(?=\s*(?:[\d({\[]|[A-Za-z](?![A-Za-z])))", "√"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (r"\\ang\s*\{([^{}]*)\}", r"\1°"),
        (r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|°)|\\(?:degree|textdegree)(?![A-Za-z])", "°"),
        (r"(?<=\d)\s*\^\s*(?:\{\s*o\s*\}|o|\\(?:text|mathrm)\s*\{\s*o\s*\})(?![A-Za-z])", "°"),
        (r"\\(?:lbrace|lbrack)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace|rbrack)(?![A-Za-z])", r"\\}"),
        (r"\\%", "%"),
        (r"\\leq(?![A-Za-z])", r"\\le"),
        (r"\\geq(?![A-Za-z])", r"\\ge"),
        (r"\\neq(?![A-Za-z])", r"\\ne"),
        (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (
            r"(?<![A-Za-z\\])(arc)?(sin|cos|tan|cot|ln|log|lg|exp)"
            r"(?=\s*[(^_]|\s*\\(?!text)|\s*\d|\s+[A-Za-z](?![A-Za-z]))",
            r"\\\1\2",
        ),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        (r"\\(?:varnothing|\{\s*\\\})(?![A-Za-z])", r"\\emptyset "),
        (r"\\langle(?![A-Za-z])", "⟨"),
        (r"\\rangle(?![A-Za-z])", "⟩"),
    )
]


def normalise(text: str) -> str:
    """Normalises `text` to plain LaTeX without fonts, delimiters, Unicode variants, or marks around and after it.

    Example: `normalise("$１２\\\\,５００\\\\text{ cm}²$.") == "12 500 \\\\text{cm} ^{2}"` but for spaces
    """
    text = _RAISED_RUN.sub(lambda run: f"^{{{run[0].translate(_RAISED)}}}", text)
    text = _LOWERED_RUN.sub(lambda run: f"_{{{run[0].translate(_LOWERED)}}}", text)
    text = re.sub(r"(?<=\d)\s*[–—]\s*(?=\d)", " to ", text)  # between numbers a long dash is a range
    text = _without_delimiters(text.translate(_TABLE))
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    for _ in range(3):  # fonts within fonts
        text = re.sub(_OLD_FONTS, r"\\text{\1}", re.sub(_FONTS, _upright, text))
    return _bare(text)


def without_fonts(text: str) -> str:
    """Replaces each `\\text{…}` in `text` by its content."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text)


_PREFIX = re.compile(
    r"^(\\text\{)?\s*(?:the )?(?:final |correct |right )?answer\s*(?:is\b|:|=)\s*:?\s*(\})?\s*(?=\S)", re.I
)


def _upright(font: re.Match[str]) -> str:
    content = font[1]
    inner = re.sub(r"\s+", " ", content.strip())
    kept = f"\\text{{{inner}}}" if re.search(r"[^\W\d_]", inner) and not re.search(r"[\d\\()]", inner) else inner
    return " " * content.startswith(" ") + kept + " " * content.endswith(" ")


def _without_delimiters(text: str) -> str:
    """Removes `\\(…\\)`, `\\[…\\]` and `$…$`; a remaining `$` is a currency."""
    text = re.sub(r"\\[()\[\]]", " ", text).replace("\\$", "\ue000").replace("$$", "$")
    signs = len(re.findall(r"\$", text))
    amounts = len(re.findall(r"(?<![^\s(\-+])\$(?=\s?[\d.])", text))
    if signs % 2 == 0 and (amounts < signs or signs == 0):
        text = text.replace("$", "")
    return text.replace("\ue000", "$")


def _bare(text: str) -> str:
    """Strips white space, enclosing marks of emphasis, quotation or grouping, and a final stop."""
    before = None
    while before != text:
        before, text = text, re.sub(r"\s+", " ", text).strip(" ")
        if not text.endswith(".."):
            text = re.sub(r"^\s*=(?!=)|[ .,;]+$|(?:\s*\\\\)+$", "", text)
        for mark in ("**", "`", '"', "'", "*"):
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        if re.fullmatch(r"\{[^{}]*\}", text):
            text = text[1:-1]
        text = _PREFIX.sub(lambda found: "\\text{" if found[1] and not found[2] else "", text)
        text = re.sub(r"^\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}$", r"\1", text)
    return text
