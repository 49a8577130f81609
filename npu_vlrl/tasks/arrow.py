"""Task `arrow`: name the direction in which a hidden arrow points."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import PIL.Image
import PIL.ImageDraw

from npu_vlrl.config import Config
from npu_vlrl.tasks.turned import demonstration, hidden_task, turned
from npu_vlrl.types import Task

__all__ = ["arrow_task", "demonstration", "generated"]


def generated(config: Config, seed: int, unit: int) -> Callable[[int], Task]:
    """Generator of arrow tasks. The hidden image is 2 x 2 image tokens, and the card is one."""
    return lambda index: arrow_task(seed, index, size=2 * unit, card=unit)


def arrow_task(seed: int, index: int, size: int = 56, card: int = 28) -> Task:
    """Makes a dark arrow on a light ground, up to size/14 pixels off the centre. `size`, `card`: see `hidden_task`."""
    rng = random.Random(f"arrow/{seed}/{index}")
    turns = rng.randrange(4)
    ground = tuple(rng.randint(190, 255) for _ in range(3))
    colour = tuple(rng.randint(0, 90) for _ in range(3))
    shift = size // 14
    x, y = (size // 2 + rng.randint(-shift, shift) for _ in range(2))
    unit = size / 14
    outline = [(0, -5), (4, 0), (1.3, 0), (1.3, 5), (-1.3, 5), (-1.3, 0), (-4, 0)]  # pointing up, in units, y down
    pil = PIL.Image.new("RGB", (size, size), ground)
    PIL.ImageDraw.Draw(pil).polygon([(x + dx * unit, y + dy * unit) for dx, dy in outline], fill=colour)
    return hidden_task(
        "arrow", seed, index, "Which way does the arrow point?", turned(np.asarray(pil), turns), turns, card
    )
