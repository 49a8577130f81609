"""The forms in which a policy thinks and acts, as published with VAGEN (arXiv 2510.16907)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npu_vlrl.config import EnvironmentConfig

THOUGHTS = {
    "no_think": (),
    "free_think": ("think",),
    "grounding": ("observation", "reasoning"),
    "worldmodeling": ("reasoning", "prediction"),
    "grounding_worldmodeling": ("observation", "reasoning", "prediction"),
}
"""The parts that stand before the answer, by the name of the format; several stand inside one <think>."""

_WANTED = {
    "think": "what you think",
    "observation": "what you see",
    "reasoning": "how you decide",
    "prediction": "what you expect to see next",
}


@dataclass(frozen=True)
class Parsed:
    """What a text says in a format."""

    answer: str | None
    """What the last pair of answer tags holds, also where the format is not right; None without such a pair."""
    thoughts: Mapping[str, str]
    """What the other tags hold, as far as they are there."""
    right: bool
    """The whole text, apart from white space around and between the tags, is in the format."""


class Format:
    """A form of `THOUGHTS`, with `tag` around the answer and, if not empty, `end` after it.

    Raises ValueError when tag or end cannot be told from the other tags.

    Example: `Format("free_think").parse("<think>The box is above.</think><answer>Up</answer>").answer == "Up"`
    """

    def __init__(self, name: str, tag: str = "answer", end: str = "") -> None:
        thoughts = THOUGHTS[name]
        pieces: list[tuple[str, str | None]] = []
        """Every tag, with the name of the part that it opens."""
        for part in (*thoughts, tag):
            pieces += [(f"<{part}>", part), (f"</{part}>", None)]
        if len(thoughts) > 1:
            pieces = [("<think>", None), *pieces[:-2], ("</think>", None), *pieces[-2:]]
        if end:
            pieces.append((end, None))
        tags = [piece for piece, _ in pieces]
        if any(a in b for i, a in enumerate(tags) for j, b in enumerate(tags) if i != j) or end != end.strip():
            raise ValueError(f"the tags {' '.join(tags)} cannot be told apart; choose another answer_tag or end_token")
        self._pieces = pieces
        self._thoughts = thoughts
        self.tag = tag

    def parse(self, text: str) -> Parsed:
        """Takes time linear in `text`."""
        found = {part: _content(text, part) for part in self._thoughts}
        thoughts = {part: content for part, content in found.items() if content is not None}
        return Parsed(_content(text, self.tag), thoughts, self._matches(text.strip()))

    def write(self, parts: Mapping[str, str]) -> str:
        """A text in the format; `parts` holds the thoughts and, under the answer's tag, the answer."""
        return "".join(tag + ("" if part is None else parts[part]) for tag, part in self._pieces)

    @property
    def form(self) -> str:
        """What the policy is shown of the format, e.g. `<think>…</think><answer>…</answer>`."""
        return self.write(dict.fromkeys((*self._thoughts, self.tag), "…"))

    @property
    def instructions(self) -> str:
        """Tells the policy to keep to the format."""
        wanted = ", ".join(f"in <{part}> {_WANTED[part]}" for part in self._thoughts)
        return f"Write exactly in this form: {self.form}" + (f" ({wanted})" if wanted else "")

    def _matches(self, text: str) -> bool:
        """Each tag stands there once, in order, with nothing but white space where no part is open."""
        position, inside = 0, False
        for tag, part in self._pieces:
            start = text.find(tag, position)
            if start < 0 or text.count(tag) != 1 or not (inside or not text[position:start].strip()):
                return False
            position, inside = start + len(tag), part is not None
        return position == len(text)


def make_format(config: EnvironmentConfig) -> Format:
    """The configured one; raises what `Format` raises."""
    return Format(config.format, config.answer_tag, config.end_token)


def _content(text: str, part: str) -> str | None:
    """What the last pair of tags holds."""
    opening, closing = f"<{part}>", f"</{part}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    return text[start + len(opening) : text.find(closing, start)].strip() if start >= 0 else None
