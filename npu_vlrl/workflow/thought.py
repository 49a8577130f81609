"""Splits a turn into its thoughts and its answer; the only module that interprets `<think>` and `</think>`.

Calls, answers and formats are read from the answer alone, so drafts in a thought do not count.

- A thought runs from `<think>` to the next `</think>`; a `<think>` inside it is part of it.
- A text whose first tag is `</think>` begins inside a thought, which the chat template opened.
- Without a `</think>` to come, the first `<think>` begins a thought that never ends. A later one does so where it
  begins a line or follows a thought; elsewhere it is a mention in the answer.
- A `</think>` after the end of a thought is a mention, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"

LEFT_OPEN = f"…\n{CLOSE}\n\n"
"""Thought of a demonstrator where the chat template opens one; white space as in Qwen's templates."""

UNFINISHED_FEEDBACK = (
    f"Your turn ended inside your thought, so it has no answer. Think less, end the thought with {CLOSE}, then answer."
)

_TAG = re.compile(f"{OPEN}|{CLOSE}")
_FOLLOWS = re.compile(rf"\s*({OPEN})")
_BEGINS_A_LINE = re.compile(rf"^[ \t]*({OPEN})", re.MULTILINE)


@dataclass(frozen=True)
class SplitTurn:
    """Thoughts and answer of a turn's text.

    Example: `split_thought("<think>Half of 8.</think> 4").answer == "4"`
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each thought in `text`, its tags included; in order, and never overlapping."""
    finished: bool
    """Whether the last thought ends: false when the turn was cut off in it, or ended without `</think>`."""

    @property
    def answer(self) -> str:
        """Text outside of the thoughts, without white space around it."""
        ends = [0, *(end for _, end in self.spans)]
        begins = [*(begin for begin, _ in self.spans), len(self.text)]
        return " ".join(self.text[a:b] for a, b in zip(ends, begins, strict=True)).strip()

    @property
    def blanked(self) -> str:
        """`text` with a space for each character of a thought, so that positions stay."""
        pieces, position = [], 0
        for begin, end in self.spans:
            pieces += [self.text[position:begin], " " * (end - begin)]
            position = end
        return "".join([*pieces, self.text[position:]])

    @property
    def thought(self) -> str | None:
        """Content of the first finished thought; None without one."""
        ended = self.spans if self.finished else self.spans[:-1]
        if not ended:
            return None
        begin, end = ended[0]
        return self.text[begin : end - len(CLOSE)].removeprefix(OPEN)

    @property
    def finished_text(self) -> str:
        """`text` without a thought that never ends."""
        return self.text if self.finished else self.text[: self.spans[-1][0]]

    @property
    def holds_nothing(self) -> bool:
        """Whether the turn is a thought that never ends, so that there is no answer to judge."""
        return not self.finished and not self.answer

    @property
    def one_thought_first(self) -> bool:
        """Whether the turn is one finished thought, opened once, and then an answer without tags of thoughts."""
        if len(self.spans) != 1 or not self.finished:
            return False
        begin, end = self.spans[0]
        opened_twice = (self.thought or "").lstrip().startswith(OPEN)
        return not self.text[:begin].strip() and not opened_twice and not _TAG.search(self.text, end)


def split_thought(text: str) -> SplitTurn:
    """Splits the text of a turn by the rules of this module. Takes time linear in `text`."""
    spans: list[tuple[int, int]] = []
    begin: int | None = None
    last_end = text.rfind(CLOSE) + len(CLOSE) if CLOSE in text else 0
    for tag in _TAG.finditer(text, 0, last_end):
        if tag[0] == OPEN:
            begin = tag.start() if begin is None else begin
        elif begin is not None or not spans:
            spans.append((begin or 0, tag.end()))
            begin = None
    unfinished = _reopened(text, spans[-1][1]) if spans else text.find(OPEN)
    if unfinished >= 0:
        spans.append((unfinished, len(text)))
    return SplitTurn(text, tuple(spans), finished=unfinished < 0)


def _reopened(text: str, end: int) -> int:
    """Position after `end` at which a thought without an end begins; -1 without one."""
    found = _FOLLOWS.match(text, end) or _BEGINS_A_LINE.search(text, end)
    return found.start(1) if found else -1


def opened_thought(prompt: str) -> str:
    """Thought that a generation prompt leaves open: the `<think>` and the text after it.

    Example: `opened_thought("assistant: <think> ") == "<think> "`, and "" for "assistant: <think></think>".
    """
    begin = prompt.rfind(OPEN)
    return prompt[begin:] if begin > prompt.rfind(CLOSE) else ""
