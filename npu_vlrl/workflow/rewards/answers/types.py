"""Kinds of readings of a short answer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from npu_vlrl.workflow.rewards.answers.units import Unit


@dataclass(frozen=True)
class Text:
    """Words, compared by their letters alone: without spaces, case, quotes and a full stop."""

    letters: str


@dataclass(frozen=True)
class Option:
    """Letter of a choice, or a variable, and the text after it."""

    letter: str
    rest: str


@dataclass(frozen=True)
class Number:
    """Exact value; without a unit where none is written."""

    value: Fraction
    unit: Unit | None = None

    @property
    def latex(self) -> str:
        above, below = self.value.numerator, self.value.denominator
        return str(above) if below == 1 else f"{'-' if above < 0 else ''}\\frac{{{abs(above)}}}{{{below}}}"


@dataclass(frozen=True)
class Formula:
    """Text that must be parsed as mathematics."""

    latex: str
    unit: Unit | None = None


@dataclass(frozen=True)
class Group:
    """Elements in `brackets`: `()`, `[)`, `{}` and so on, or none for a bare list, whose order does not count."""

    brackets: str
    items: tuple[Reading, ...]
    latex: str


@dataclass(frozen=True)
class Labelled:
    """Value with its label, as in `x = 5`."""

    label: str
    value: Reading
    latex: str


@dataclass(frozen=True)
class Ambiguous:
    """Text with several plain readings: in words, and those of them that can be compared."""

    meanings: tuple[str, ...]
    options: tuple[Reading, ...]
    remedy: str

    def refusal(self, gold: str) -> str:
        return f"the gold answer {gold[:80]!r} can be read as {' or as '.join(self.meanings)}; {self.remedy}"


Reading = Text | Option | Number | Formula | Group | Labelled | Ambiguous
