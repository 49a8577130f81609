"""Reads short answers, golds and given ones alike, and compares two readings.

`normalise` converts all notations to one plain LaTeX; `reading.read` classifies it, with `exact` values of numbers and
`units` behind them; `compare.same` compares two readings. Formulas are left to the caller, who uses math-verify's
parser and `functions` for their values.
"""

from __future__ import annotations

from npu_vlrl.workflow.rewards.answers.compare import Formulas, same, same_plain
from npu_vlrl.workflow.rewards.answers.reading import quantity, read
from npu_vlrl.workflow.rewards.answers.types import (
    Ambiguous,
    Formula,
    Group,
    Labelled,
    Number,
    Option,
    Reading,
    Text,
)

__all__ = [
    "Ambiguous",
    "Formula",
    "Formulas",
    "Group",
    "Labelled",
    "Number",
    "Option",
    "Reading",
    "Text",
    "quantity",
    "read",
    "same",
    "same_plain",
]
