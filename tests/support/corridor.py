"""A small game for tests, as a user would write one: a walk along a corridor to its lit end."""

from __future__ import annotations

import random

import numpy as np

from npu_vlrl.types import Image
from npu_vlrl.workflow.environments.game import Move


class Corridor:
    """`length` cells; the walker starts in a random one but the ends. One end is lit, the other is a pit."""

    actions = ("Left", "Right", "Wait")
    rules = "Walk to the bright end of the corridor."

    def __init__(self, length: int, toll: float) -> None:
        if length < 3:
            raise ValueError(f"length is {length}; a corridor has at least 3 cells")
        self.length, self.toll = length, toll

    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        self.place, self.goal = rng.randrange(1, self.length - 1), rng.choice([0, self.length - 1])

    def act(self, action: str) -> Move:
        self.place += {"Left": -1, "Right": 1, "Wait": 0}[action]
        at_end = self.place in (0, self.length - 1)
        solved = self.place == self.goal
        return Move({"toll": -self.toll, "goal": float(solved)}, solved=solved, over=at_end)

    def picture(self) -> Image:
        rgb = np.zeros((28, 28 * self.length, 3), np.uint8)
        rgb[:, 28 * self.place : 28 * self.place + 28, 0] = 255
        rgb[:, 28 * self.goal : 28 * self.goal + 28, 1] = 255
        return Image(rgb)

    def state_key(self) -> str:
        return f"{self.place} of {self.length}, goal {self.goal}"

    def solution(self) -> list[str]:
        way = self.goal - self.place
        return ["Right" if way > 0 else "Left"] * abs(way)


def game(length: int = 5, toll: float = 0.1) -> Corridor:
    return Corridor(length, toll)
