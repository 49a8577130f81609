"""Rule `geometry3k`: 0.9 for the right answer and 0.1 for thinking before it."""

from __future__ import annotations

from npu_vlrl.types import Verdict
from npu_vlrl.workflow.rewards.math_verify import NO_BOX_FEEDBACK, check_gold, equals, last_box
from npu_vlrl.workflow.thought import split_thought

__all__ = ["check_gold", "score"]


def score(answer: str, text: str) -> Verdict:
    """Scores 0.9 * accuracy + 0.1 * format; solved by accuracy alone, lest a correct, unformatted answer be retried.

    Accuracy: the last box outside of thoughts equals `answer` by math-verify. Format: the text is one thought, which
    ends with `</think>`, and then an answer with a `\\boxed{…}`. The `<think>` may be missing: where the chat template
    wrote it, no sampled text has one. Raises DataError when `answer` cannot be parsed.
    """
    split = split_thought(text)
    box = last_box(split.answer)
    equal = equals(answer, box)
    formatted = split.one_thought_first and box is not None
    terms = {"accuracy": 0.9 * equal, "format": 0.1 * formatted}
    return Verdict(sum(terms.values()), equal, NO_BOX_FEEDBACK if box is None else None, terms)
