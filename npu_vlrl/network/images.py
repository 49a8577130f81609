"""Images in messages: the pixels of an image are sent once to each reader, and referred to by their hash afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from npu_vlrl.types import Image, ImageInput

CACHE_BYTES = 2**28
"""Default size of a reader's cache of pixels, in bytes."""

INTEGERS, FLOATS, ROUTES = np.dtype("<i8"), np.dtype("<f8"), np.dtype("<i2")


class ImageEntry(msgspec.Struct, frozen=True):
    """One image of a message."""

    hash: str
    grid: tuple[int, int, int]
    n_tokens: int
    size: tuple[int, int] | None
    """Height and width of an image whose pixels are in the message; None for one that the reader has."""


class Images(msgspec.Struct, frozen=True):
    """The distinct images of a message."""

    entries: list[ImageEntry]
    dropped: list[str]
    """Hashes of images that the reader drops."""
    pixels: list[bytes]
    """uint8 [height, width, 3] of each entry with a size, in order."""


class ImageWriter:
    """Writes images for one reader, and tracks the images that it has.

    The least recently used ones are dropped when all together exceed `cache_bytes`, but none that the message needs.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self.cache_bytes = cache_bytes
        self._held: OrderedDict[str, int] = OrderedDict()
        """Bytes of each image by hash, in the order of use."""

    def pack(self, images: Iterable[ImageInput]) -> Images:
        """Packs distinct images."""
        entries: list[ImageEntry] = []
        pixels: list[bytes] = []
        for image in images:
            rgb, name = image.image.rgb, image.image.hash
            is_new = name not in self._held
            if is_new:
                pixels.append(rgb.tobytes())
            self._held[name] = rgb.nbytes
            self._held.move_to_end(name)
            size = (rgb.shape[0], rgb.shape[1]) if is_new else None
            entries.append(ImageEntry(name, image.grid, image.n_tokens, size))
        return Images(entries, self._drop({entry.hash for entry in entries}), pixels)

    def _drop(self, needed: set[str]) -> list[str]:
        dropped = []
        size = sum(self._held.values())
        for name in [name for name in self._held if name not in needed]:
            if size <= self.cache_bytes:
                break
            size -= self._held.pop(name)
            dropped.append(name)
        return dropped


class ImageReader:
    """Reads images, and keeps them until a message drops them."""

    def __init__(self) -> None:
        self._held: dict[str, Image] = {}

    def unpack(self, images: Images) -> list[ImageInput]:
        """The images that were packed. Raises ValueError when one is not the image that its hash names."""
        arriving = iter(images.pixels)
        for name in images.dropped:
            del self._held[name]
        for entry in images.entries:
            if entry.size is not None:
                image = Image(np.frombuffer(next(arriving), np.uint8).reshape(*entry.size, 3))
                if image.hash != entry.hash:
                    raise ValueError(f"image {entry.hash[:12]} came with the pixels of {image.hash[:12]}")
                self._held[entry.hash] = image
        return [ImageInput(self._held[entry.hash], entry.grid, entry.n_tokens) for entry in images.entries]


def as_bytes(values: Sequence[float] | np.ndarray, dtype: np.dtype) -> bytes:
    """Bytes of a message's numbers, bit by bit; `dtype` is `INTEGERS`, `FLOATS` or `ROUTES`."""
    return np.array(values, dtype).tobytes()
