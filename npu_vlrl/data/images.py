"""Any picture file or Pillow image becomes an upright RGB `Image`, or a `DataError` that says which one is at fault.

Order of events: size check on the header, decoding, EXIF orientation, 16 bit to 8 bit, transparency onto white, RGB.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image

from npu_vlrl.types import DataError, Image

MAX_PIXELS = 1 << 26
"""Largest width * height that is decoded: 67 million pixels, 192 MiB as RGB."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats that are opened. Others stay shut: some of Pillow's readers start other programs (EPS)."""

_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, where: str) -> Image:
    """Decodes the first frame of a picture file held in memory.

    `where` names the picture in errors, e.g. `train.parquet row 17, images[0]`.
    Raises DataError when the bytes are empty, truncated, not one of `FORMATS`, or larger than `MAX_PIXELS`.
    """
    if not data:
        raise DataError(f"{where}: the image has zero bytes; store the encoded file (PNG, JPEG, ...) again")
    try:
        with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as pil:
            return from_pil(pil, where)
    except DataError:
        raise
    except PIL.UnidentifiedImageError as error:
        raise DataError(f"{where}: not an image that can be read; use one of {', '.join(FORMATS)}") from error
    except PIL.Image.DecompressionBombError as error:
        raise DataError(f"{where}: the image is larger than {MAX_PIXELS} pixels; scale it down") from error
    except Exception as error:  # Pillow's readers raise nearly every type on damaged files
        raise DataError(
            f"{where}: the image is damaged or truncated ({type(error).__name__}: {error}); replace the file"
        ) from error


def read_image(path: Path, where: str, root: Path | None) -> Image:
    """Reads a picture file. A relative `path` is taken from `root`, which it must not leave, not even by a link.

    `root=None` allows any path. Raises DataError as `decode_image` does, and for a path outside or not a file.
    """
    if "\0" in str(path):
        raise DataError(f"{where}: the image path {str(path)!r} contains a null byte; write the path again")
    full = path.resolve() if root is None else (root / path).resolve()
    if root is not None and not full.is_relative_to(root.resolve()):
        raise DataError(f"{where}: the image path {path} leaves {root}; move the image into that folder")
    if not full.is_file():
        raise DataError(f"{where}: there is no image file {full}; correct the path or add the file")
    return decode_image(full.read_bytes(), where)


def from_pil(pil: PIL.Image.Image, where: str = "image") -> Image:
    """Converts a Pillow image of any mode; a file opened by Pillow is turned upright by its EXIF orientation.

    Raises DataError for more than `MAX_PIXELS`, no pixels at all, or values that have no defined 8-bit range.
    """
    width, height = pil.size
    if width * height > MAX_PIXELS:
        raise DataError(f"{where}: the image has {width}x{height} pixels, more than {MAX_PIXELS}; scale it down")
    if width * height == 0:
        raise DataError(f"{where}: the image has {width}x{height} pixels; remove it")
    pil.load()  # first: while loading, Pillow turns TIFF files itself and then forgets their orientation
    turn = _UPRIGHT.get(pil.getexif().get(_EXIF_ORIENTATION, 1))
    return Image(_rgb(pil if turn is None else pil.transpose(turn), where))


def _rgb(pil: PIL.Image.Image, where: str) -> np.ndarray:
    """uint8 [height, width, 3]"""
    if pil.mode.startswith("I"):
        return _from_16_bit(np.asarray(pil).astype(np.int64), where)
    if pil.mode == "F":
        raise DataError(f"{where}: floating-point pixels have no defined range; save the image with 8 bits")
    if pil.has_transparency_data:
        rgba = np.asarray(pil.convert("RGBA")).astype(np.uint16)
        alpha = rgba[..., 3:]
        return ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    return np.array(pil.convert("RGB"))


def _from_16_bit(grey: np.ndarray, where: str) -> np.ndarray:
    """[height, width] of 0..65535 to uint8 [height, width, 3], rounding to nearest; Pillow's own conversion clips."""
    if grey.min() < 0 or grey.max() > 65535:
        raise DataError(f"{where}: pixels of 32 bits have no defined range; save the image with 8 or 16 bits")
    grey8 = ((grey * 255 + 32767) // 65535).astype(np.uint8)
    return np.repeat(grey8[:, :, None], 3, axis=2)
