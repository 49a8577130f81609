"""The share of the gold's letters that an answer has at their places."""

from __future__ import annotations

from npu_vlrl.types import DataError, Verdict

INLINE = True


def score(answer: str, text: str) -> Verdict:
    """Takes time linear in `text`."""
    said = text.strip()
    share = sum(a == b for a, b in zip(answer, said, strict=False)) / max(len(answer), len(said))
    return Verdict(share, share == 1)


def check_gold(answer: str) -> None:
    """Raises DataError for an empty gold."""
    if not answer:
        raise DataError("the gold answer is empty; nothing could equal it")
