"""Lamps: press them until all are lit; each press switches one lamp."""

from __future__ import annotations

import random

import numpy as np

from npu_vlrl.types import Image
from npu_vlrl.workflow.environments.game import Move


class Lamps:
    actions = ("left", "middle", "right")
    rules = "Press lamps until all three are lit."

    def start(self, seed: int) -> None:
        self.lit = [bool(random.Random(seed + number).getrandbits(1)) for number in range(3)]
        self.lit[seed % 3] = False

    def act(self, action: str) -> Move:
        place = self.actions.index(action)
        self.lit[place] = not self.lit[place]
        return Move({"lit": float(all(self.lit))}, solved=all(self.lit))

    def picture(self) -> Image:
        rgb = np.full((28, 84, 3), 60, np.uint8)
        for place in np.flatnonzero(self.lit):
            rgb[4:24, 28 * place + 4 : 28 * place + 24] = (255, 220, 80)
        return Image(rgb)

    def state_key(self) -> str:
        return str(self.lit)

    def solution(self) -> list[str]:
        return [action for action, lit in zip(self.actions, self.lit, strict=True) if not lit]


def game() -> Lamps:
    return Lamps()
