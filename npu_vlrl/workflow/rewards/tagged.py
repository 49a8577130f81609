"""Rule `tagged`: a short answer in `<answer>…</answer>`; words are compared as strings, others by plain readings."""

from __future__ import annotations

from collections.abc import Sequence

from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.rewards.answers import Ambiguous, Text, read, same_plain
from npu_vlrl.workflow.thought import split_thought

INLINE = True

OPEN, CLOSE = "<answer>", "</answer>"


def score(answer: str, text: str, *, format_weight: float = 0.1, choices: Sequence[str] = ()) -> Verdict:
    """Scores (1 - format_weight) * accuracy + format_weight * format; solved by accuracy alone.

    Only what stands outside of thoughts counts. Accuracy: the last tag pair holds `answer`, without surrounding
    whitespace and regardless of case; where `answer` is not words, any equal reading (see `answers.same_plain`).
    Format: it is exactly one tag pair, which holds one of `choices` where these are given. Raises ValueError when
    `format_weight` is not in 0..1. Takes time linear in `text`.
    """
    if isinstance(format_weight, bool) or not isinstance(format_weight, int | float) or not 0 <= format_weight <= 1:
        raise ValueError(f"format_weight is {format_weight!r}; it must be a number from 0 to 1")
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices is {choices!r}; it must be a list of strings (quote numbers and yes/no)")
    outside = split_thought(text).answer
    content = last_tag(outside)
    right = content is not None and _right(answer, content)
    formatted = content is not None and _is_one_tag(outside) and _allowed(content, choices)
    terms = {"accuracy": (1 - format_weight) * right, "format": format_weight * formatted}
    return Verdict(sum(terms.values()), right, terms=terms)


def check_gold(answer: str, *, format_weight: float = 0.1, choices: Sequence[str] = ()) -> None:
    """Raises DataError when no answer could both be right and keep to the format."""
    if not _plain(answer):
        raise DataError("the gold answer is empty; nothing could equal it")
    reading = read(answer)
    if not choices and isinstance(reading, Ambiguous) and reading.options:
        raise DataError(reading.refusal(answer))
    if not _allowed(_plain(answer), choices):
        raise DataError(f"the gold answer {answer[:80]!r} is none of the choices {', '.join(choices)}")


def _right(answer: str, content: str) -> bool:
    if not content or _plain(content) == _plain(answer):
        return bool(content)
    return not isinstance(read(answer), Text) and same_plain(answer, content)


def _plain(text: str) -> str:
    return text.strip().casefold()


def _allowed(content: str, choices: Sequence[str]) -> bool:
    return not choices or _plain(content) in map(_plain, choices)


def last_tag(text: str) -> str | None:
    """Content of the last `<answer>…</answer>` without surrounding whitespace, or None."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, max(end, 0))
    return text[start + len(OPEN) : end].strip() if start >= 0 else None


def _is_one_tag(text: str) -> bool:
    text = text.strip()
    return text.startswith(OPEN) and text.endswith(CLOSE) and text.count(OPEN) == text.count(CLOSE) == 1
