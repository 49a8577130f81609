"""Endless tasks, each a function of seed and index alone, so that any of them can be made at any time.

Two kinds have a known answer: which way is up in a turned photograph, and where does an arrow point. The model first
sees a covered card; the `look` tool shows `extra["hidden_image"]`. The third kind are the episodes of a game.
"""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import PIL.Image
import PIL.ImageDraw

from npu_vlrl.data.images import decode_image
from npu_vlrl.types import Image, Message, Task

DIRECTIONS = ("up", "right", "down", "left")
"""Answers; the index is the number of quarter turns clockwise from up."""

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
PHOTO_SIDE = 160
"""Photographs are squeezed to this square before a crop is taken."""

_CARD_COLOUR = (120, 120, 120)


@cache
def load_photos() -> list[Image]:
    """The four photographs that come with the package, as published."""
    folder = importlib.resources.files("npu_vlrl.data") / "assets" / "photos"
    return [decode_image((folder / name).read_bytes(), name) for name in PHOTOS]


def photo_task(seed: int, index: int, photos: Sequence[Image], size: int = 56, card: int = 28) -> Task:
    """A square crop (112 to 160 of 160 pixels) of a photograph, mirrored or not, turned, brighter or darker.

    `size` and `card` are the sides in pixels of the hidden picture and of the card that covers it.
    """
    rng = random.Random(f"photo/{seed}/{index}")
    turns = rng.randrange(4)
    picture = _squeezed(rng.choice(photos))
    side = rng.randint(112, PHOTO_SIDE)
    left, top = rng.randint(0, PHOTO_SIDE - side), rng.randint(0, PHOTO_SIDE - side)
    crop = np.asarray(picture.crop((left, top, left + side, top + side)).resize((size, size)))
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    lit = np.clip(crop * rng.uniform(0.7, 1.3) + 0.5, 0, 255).astype(np.uint8)
    return _task("photo", seed, index, "Which way is the top of the photo?", _turned(lit, turns), turns, card)


def arrow_task(seed: int, index: int, size: int = 56, card: int = 28) -> Task:
    """A dark arrow on a light ground, up to size/14 pixels off the centre. `size`, `card`: as in `photo_task`."""
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
    return _task("arrow", seed, index, "Which way does the arrow point?", _turned(np.asarray(pil), turns), turns, card)


def episode_task(game: str, seed: int, index: int) -> Task:
    """An episode of a game, which makes everything else out of `extra["seed"]`, 0 to 2**32 - 1."""
    name = f"{game}/{seed}/{index}"
    return Task(name, (), None, game, {"seed": random.Random(name).getrandbits(32)})


@cache
def _squeezed(photo: Image) -> PIL.Image.Image:
    return PIL.Image.fromarray(photo.rgb).resize((PHOTO_SIDE, PHOTO_SIDE))


def _turned(rgb: np.ndarray, turns: int) -> Image:
    """Turned clockwise by quarter turns, exactly."""
    return Image(np.ascontiguousarray(np.rot90(rgb, -turns)))


def _task(kind: str, seed: int, index: int, question: str, hidden: Image, turns: int, card: int) -> Task:
    cover = Image(np.full((card, card, 3), _CARD_COLOUR, np.uint8))
    message = Message("user", (cover, question))
    return Task(f"{kind}/{seed}/{index}", (message,), DIRECTIONS[turns], kind, {"hidden_image": hidden})
