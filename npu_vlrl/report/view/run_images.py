"""Images of a run folder: their sizes and files."""

from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path

from PIL import Image as Pillow

HASH = re.compile("[0-9a-f]{64}")

PNG_BYTES = 48 * 2**20
"""Total size in bytes above which images are put into a page as lossy WebP."""

QUALITY = 80


class RunImages:
    """Image files `images/HASH.png` of a run folder. A name that is no hash is no image."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.size = cache(self._size)

    def file(self, name: str) -> Path | None:
        """Path of an image's file; None when it does not exist."""
        file = self._folder / f"{name}.png"
        return file if HASH.fullmatch(name) and file.is_file() else None

    def _size(self, name: str) -> tuple[int, int] | None:
        """(width, height) as stored; None when no image can be read. Reads no pixel."""
        file = self.file(name)
        try:
            with Pillow.open(file or "", formats=("PNG",)) as image:
                return image.size
        except (OSError, ValueError, Pillow.DecompressionBombError):
            return None

    def encoded(self, name: str, lossy: bool) -> bytes:
        """Content of the file, or the same image as WebP. `size` must have found it."""
        data = (self._folder / f"{name}.png").read_bytes()
        if not lossy:
            return data
        packed = io.BytesIO()
        with Pillow.open(io.BytesIO(data), formats=("PNG",)) as image:
            image.convert("RGB").save(packed, "WEBP", quality=QUALITY)
        return min(data, packed.getvalue(), key=len)
