"""A small environment for tests, as a user would write one: free text, two images, states, its own end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from npu_vlrl.types import Environment, EpisodeStatus, Image, Message, Step, Task, Turn, Verdict

OPEN: list[Dialogue] = []
"""Those that were reset and not closed yet."""


class Dialogue(Environment):
    """Earns by the length of what is said: 0 to 1 in quarters. An answer without letters is none."""

    def __init__(self, turns: int) -> None:
        if turns < 1:
            raise ValueError(f"turns is {turns}; a dialogue has at least 1")
        self.turns = turns

    async def reset(self, task: Task) -> Sequence[Message]:
        OPEN.append(self)
        self.said = 0
        self.rng = random.Random(task.extra["seed"])
        return [Message("system", ("Talk.",)), Message("user", (self._picture(), "and", self._picture(), "Speak."))]

    async def step(self, text: str, history: Sequence[Turn]) -> Step:
        self.said += 1
        status = EpisodeStatus.TRUNCATED if self.said == self.turns else None
        if not any(letter.isalpha() for letter in text):
            return Step(-0.5, (Message("user", ("Speak with letters.",)),), status, invalid=True)
        reward = np.float32(len(text) % 5 / 4)
        terms = {"length": reward, "turns": np.int64(len(history))}
        told = (Message("user", (self._picture(), f"You have said {self.said}.")),)
        return Step(reward, told, status, Verdict(reward, bool(reward == 1), terms=terms))  # type: ignore[arg-type]

    def state_key(self) -> str:
        return f"{self.said} said"

    async def close(self) -> None:
        OPEN.remove(self)

    def _picture(self) -> Image:
        return Image(np.full((28, 28, 3), self.rng.randrange(256), np.uint8))


def make(turns: int = 2) -> Dialogue:
    return Dialogue(turns)
