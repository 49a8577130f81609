"""Draws the image of a state: one square sprite a cell."""

from __future__ import annotations

import importlib.resources
from functools import cache

import numpy as np
import PIL.Image

from npu_vlrl.data.images import decode_image
from npu_vlrl.tasks.sokoban.levels import level_text
from npu_vlrl.tasks.sokoban.rules import State
from npu_vlrl.types import Image

SPRITES = {
    "#": "wall",
    " ": "floor",
    ".": "box_target",
    "$": "box",
    "*": "box_on_target",
    "@": "player",
    "+": "player_on_target",
}
"""File of the sprite of each character of a level, 16x16 pixels."""


def draw(state: State, tile: int) -> Image:
    """Draws a state, uint8 [height * tile, width * tile, 3]; equal for equal states. `tile`: side of a cell in
    pixels.
    """
    sprites = _sprites(tile)
    rows = [np.concatenate([sprites[character] for character in row], 1) for row in level_text(state).split("\n")]
    return Image(np.concatenate(rows, 0))


@cache
def _sprites(tile: int) -> dict[str, np.ndarray]:
    """Sprites scaled to `tile`: enlarged by repeating pixels, or reduced by averaging them."""
    folder = importlib.resources.files(__package__) / "assets" / "sprites"
    sprites = {}
    for character, name in SPRITES.items():
        stored = decode_image((folder / f"{name}.png").read_bytes(), name)
        scaled = PIL.Image.fromarray(stored.rgb).resize((tile, tile), PIL.Image.Resampling.BOX)
        sprites[character] = np.asarray(scaled)
    return sprites
