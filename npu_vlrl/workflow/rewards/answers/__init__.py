"""The plain reading of short answers, golds and given ones alike, and when two readings are the same.

`normalise` makes one plain LaTeX of all writings; `reading.read` says what it is, with `exact` values for numbers and
`units` behind them; `compare.same` compares two readings. Formulas are left to the caller, who has math-verify's parser
for them and `functions` for their values.
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
