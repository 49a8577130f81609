"""Formats of a policy's thoughts and actions, as published with VAGEN (arXiv 2510.16907)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.workflow.thought import CLOSE, OPEN, SplitTurn, split_thought

THOUGHTS = {
    "no_think": (),
    "free_think": ("think",),
    "grounding": ("observation", "reasoning"),
    "worldmodeling": ("reasoning", "prediction"),
    "grounding_worldmodeling": ("observation", "reasoning", "prediction"),
}
"""Parts before the answer, by the name of the format; several parts stand inside one <think>."""

_WANTED = {
    "think": "what you think",
    "observation": "what you see",
    "reasoning": "how you decide",
    "prediction": "what you expect to see next",
}


@dataclass(frozen=True)
class Parsed:
    """Content of a turn's text, read in a format."""

    answer: str | None
    """Content of the last pair of answer tags outside of thoughts, even if the format is wrong; None without a pair."""
    thoughts: Mapping[str, str]
    """Content of the other tags, as far as they are present."""
    right: bool
    """Whether the whole text, apart from white space around and between the tags, is in the format."""
    unfinished: bool
    """Whether the text is a thought that never ends."""


class Format:
    """One format of `THOUGHTS`, with `tag` around the answer and, if not empty, `end` after it.

    `opened` says whether the chat template opens a thought, and so writes the first `<think>` of each turn: the policy
    is then not asked for one, and `no_think` asks it to end that thought. None: not known; a `<think>` may be missing.
    Raises ValueError when tag or end cannot be told from the other tags.

    Example: `Format("free_think").parse("<think>The box is above.</think><answer>Up</answer>").answer == "Up"`
    """

    def __init__(self, name: str, tag: str = "answer", end: str = "", opened: bool | None = None) -> None:
        self._thoughts = THOUGHTS[name]
        self._opened = opened
        self._inner = _tags(self._thoughts) if len(self._thoughts) > 1 else []
        self._after = _tags([tag]) + ([(end, None)] if end else [])
        self.tag = tag
        tags = [piece for piece, _ in [(OPEN, None), *self._inner, (CLOSE, None), *self._after]]
        if any(a in b for i, a in enumerate(tags) for j, b in enumerate(tags) if i != j) or end != end.strip():
            raise ValueError(f"the tags {' '.join(tags)} cannot be told apart; choose another answer_tag or end_token")

    @property
    def _has_thought(self) -> bool:
        return bool(self._thoughts or self._opened)

    def parse(self, text: str) -> Parsed:
        """Parses a turn, including the `<think>` that the chat template opened. Takes time linear in `text`."""
        split = split_thought(text)
        if self._inner:
            within = text if split.thought is None else split.thought
            found = {part: _content(within, part) for part in self._thoughts}
        else:
            found = {part: split.thought and split.thought.strip() for part in self._thoughts}
        thoughts = {part: content for part, content in found.items() if content is not None}
        right = (
            self._thought_is_right(split)
            and _in_order(split.answer, self._after)
            and not any(tag in split.answer for tag, _ in self._inner)
        )
        return Parsed(_content(split.answer, self.tag), thoughts, right, split.holds_nothing)

    def _thought_is_right(self, split: SplitTurn) -> bool:
        if not self._has_thought:
            return not split.spans
        missing = self._opened is False and not split.text.lstrip().startswith(OPEN)
        in_order = not self._inner or _in_order((split.thought or "").strip(), self._inner)
        return split.one_thought_first and not missing and in_order

    def write(self, parts: Mapping[str, str]) -> str:
        """Writes a turn in the format; `parts` holds the thoughts and, under the answer's tag, the answer."""
        pieces = self._after
        if self._has_thought:
            content = None if self._inner or not self._thoughts else "think"
            pieces = [("" if self._opened else OPEN, content), *self._inner, (CLOSE, None), *pieces]
        return "".join(tag + ("" if part is None else parts[part]) for tag, part in pieces)

    @property
    def form(self) -> str:
        """Form as shown to the policy, e.g. `<think>…</think><answer>…</answer>`."""
        return self.write(dict.fromkeys((*self._thoughts, self.tag), "…"))

    @property
    def instructions(self) -> str:
        """Instruction to the policy to keep to the format."""
        wanted = ", ".join(f"in <{part}> {_WANTED[part]}" for part in self._thoughts)
        begun = f"{OPEN} is written already. Go on" if self._opened else "Write"
        return f"{begun} exactly in this form: {self.form}" + (f" ({wanted})" if wanted else "")


def _tags(parts: Sequence[str]) -> list[tuple[str, str | None]]:
    """Opening and closing tag of each part, with the name of the part after its opening tag."""
    return [piece for part in parts for piece in ((f"<{part}>", part), (f"</{part}>", None))]


def _in_order(text: str, pieces: Sequence[tuple[str, str | None]]) -> bool:
    """Whether each tag stands in `text` once, in order, with nothing but white space where no part is open."""
    position, inside = 0, False
    for tag, part in pieces:
        start = text.find(tag, position)
        if start < 0 or text.count(tag) != 1 or not (inside or not text[position:start].strip()):
            return False
        position, inside = start + len(tag), part is not None
    return position == len(text)


def make_format(config: EnvironmentConfig, opened: bool | None = None) -> Format:
    """Makes the configured format; raises what `Format` raises. `opened`: see `Format`."""
    return Format(config.format, config.answer_tag, config.end_token, opened)


def _content(text: str, part: str) -> str | None:
    """Content of the last pair of tags; None without a pair."""
    opening, closing = f"<{part}>", f"</{part}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    return text[start + len(opening) : text.find(closing, start)].strip() if start >= 0 else None
