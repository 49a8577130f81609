"""Task `photo`: tell which way is up in a turned photograph."""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import PIL.Image

from npu_vlrl.config import Config
from npu_vlrl.data.images import decode_image
from npu_vlrl.tasks.turned import demonstration, hidden_task, turned
from npu_vlrl.types import Image, Task

__all__ = ["demonstration", "generated", "load_photos", "photo_task"]

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
PHOTO_SIDE = 160
"""Side in pixels of the square to which photographs are squeezed before a crop is taken."""


def generated(config: Config, seed: int, unit: int) -> Callable[[int], Task]:
    """Generator of photo tasks. The hidden image is 2 x 2 image tokens, and the card is one."""
    photos = load_photos()
    return lambda index: photo_task(seed, index, photos, size=2 * unit, card=unit)


@cache
def load_photos() -> list[Image]:
    """Loads the four photographs of the package, as published."""
    folder = importlib.resources.files("npu_vlrl.tasks") / "photos"
    return [decode_image((folder / name).read_bytes(), name) for name in PHOTOS]


def photo_task(seed: int, index: int, photos: Sequence[Image], size: int = 56, card: int = 28) -> Task:
    """Makes a square crop (112 to 160 of 160 pixels) of a photograph, mirrored or not, turned, brighter or darker.

    `size` and `card` are the sides in pixels of the hidden image and of the card that covers it.
    """
    rng = random.Random(f"photo/{seed}/{index}")
    turns = rng.randrange(4)
    photo = _squeezed(rng.choice(photos))
    side = rng.randint(112, PHOTO_SIDE)
    left, top = rng.randint(0, PHOTO_SIDE - side), rng.randint(0, PHOTO_SIDE - side)
    crop = np.asarray(photo.crop((left, top, left + side, top + side)).resize((size, size)))
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    lit = np.clip(crop * rng.uniform(0.7, 1.3) + 0.5, 0, 255).astype(np.uint8)
    return hidden_task("photo", seed, index, "Which way is the top of the photo?", turned(lit, turns), turns, card)


@cache
def _squeezed(photo: Image) -> PIL.Image.Image:
    return PIL.Image.fromarray(photo.rgb).resize((PHOTO_SIDE, PHOTO_SIDE))
