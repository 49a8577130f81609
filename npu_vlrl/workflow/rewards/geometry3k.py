"""Geometry3K: 0.9 for the right answer and 0.1 for thinking before it."""

from __future__ import annotations

from npu_vlrl.types import Verdict
from npu_vlrl.workflow.rewards.math_verify import NO_BOX_FEEDBACK, check_gold, equals, last_box

__all__ = ["check_gold", "score"]


def score(answer: str, text: str) -> Verdict:
    """0.9 * accuracy + 0.1 * format; solved by accuracy alone, so that a correct, unformatted answer is not retried.

    Accuracy: the last box equals `answer` by math-verify. Format: the whole text, without surrounding whitespace, is
    one `<think>…</think>` and then text with a `\\boxed{…}`. Raises DataError when `answer` cannot be parsed.
    """
    box = last_box(text)
    equal = equals(answer, box)
    terms = {"accuracy": 0.9 * equal, "format": 0.1 * _formatted(text)}
    return Verdict(sum(terms.values()), equal, NO_BOX_FEEDBACK if box is None else None, terms)


def _formatted(text: str) -> bool:
    once = text.count("<think>") == text.count("</think>") == 1
    thought, _, answer = text.strip().partition("</think>")
    return once and thought.startswith("<think>") and last_box(answer) is not None
