"""Decodes image files and Pillow images to upright RGB `Image`s; raises a `DataError` that names the faulty one.

Order of events: size check on the header, decoding, EXIF orientation, 16 bit to 8 bit, transparency onto white, RGB.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from npu_vlrl.types import DataError, Image

MAX_PIXELS = 1 << 26
"""Maximum width * height that is decoded, the padding of a narrow image included: 67 million, 192 MiB as RGB."""

MAX_ASPECT = 200
"""Maximum ratio of the longest to the shortest side that towers support; narrower images are padded with white."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats that are opened. Others are refused: some of Pillow's readers start other programs (EPS)."""

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
    """Decodes the first frame of an image file held in memory.

    `where` names the image in errors, e.g. `train.parquet row 17, images[0]`.
    Raises DataError when the bytes are empty, truncated, not one of `FORMATS`, or refused by `check_size`.
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
    """Reads an image file. A relative `path` is taken from `root`, which it must not leave, not even by a link.

    `root=None` allows any path. Raises DataError as `decode_image` does, and for a path outside `root`, a path that is
    no file, and a file that cannot be read.
    """
    shown, base = shortened(str(path)), root or Path.cwd()
    if "\0" in str(path):
        raise DataError(f"{where}: the image path {shown} contains a null byte; write the path again")
    try:
        full = (base / path).resolve()
        if root is not None and not full.is_relative_to(root.resolve()):
            raise DataError(f"{where}: the image path {shown} leaves {root}; move the image into that folder")
        if not full.is_file():
            raise DataError(f"{where}: there is no image file {shown} in {base}; correct the path or add the file")
        data = full.read_bytes()
    except (OSError, RuntimeError) as error:  # a name that is too long, no permission; links that go round in circles
        problem = getattr(error, "strerror", None) or error
        raise DataError(
            f"{where}: the image file {shown} cannot be read ({shortened(str(problem))}); correct the path or the "
            "file's permissions, or give the image itself as bytes"
        ) from error
    return decode_image(data, where)


def decode_base64(text: str, where: str) -> Image:
    """Decodes a base64 image file. Raises DataError as `decode_image` does, and for text that is not base64.

    Example: `decode_base64("iVBORw0KGgo…", "train.jsonl row 17, images[0]")`
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"{where}: the bytes {shortened(text)} are text, but not base64 ({error}); write the encoded file as "
            "base64, or give its path"
        ) from error
    return decode_image(data, where)


def shortened(text: str, limit: int = 80) -> str:
    """`repr` of a value with its middle left out: a text that should be a path may hold a whole image."""
    return repr(text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}")


def padded(width: int, height: int) -> tuple[int, int]:
    """(width, height) with the shorter side grown until the aspect ratio is at most `MAX_ASPECT`."""
    return max(width, math.ceil(height / MAX_ASPECT)), max(height, math.ceil(width / MAX_ASPECT))


def check_size(width: int, height: int, where: str) -> None:
    """Raises DataError for an image without pixels, and for one with more than `MAX_PIXELS`, `padded` white included.

    A small file can have a side of millions of pixels, which `padded` turns into hundreds of gigabytes.
    """
    if width * height > MAX_PIXELS:
        raise DataError(f"{where}: the image has {width}x{height} pixels, more than {MAX_PIXELS}; scale it down")
    if width * height == 0:
        raise DataError(f"{where}: the image has {width}x{height} pixels; remove it")
    if math.prod(padded(width, height)) > MAX_PIXELS:
        raise DataError(
            f"{where}: the image has {width}x{height} pixels, too narrow: with white up to {MAX_ASPECT} to 1 it would "
            f"have more than {MAX_PIXELS}; cut it into parts or scale it down"
        )


def to_image(image: Any, where: str) -> Image:
    """Converts an `Image`, a uint8 array [height, width, 3] or a Pillow image to an `Image`; an array is copied.

    Raises DataError for anything else, and as `from_pil` does.
    """
    if isinstance(image, PIL.Image.Image):
        return from_pil(image, where)
    rgb = image.rgb if isinstance(image, Image) else image
    if not isinstance(rgb, np.ndarray) or rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
        what = f"{rgb.dtype} {list(rgb.shape)}" if isinstance(rgb, np.ndarray) else type(rgb).__name__
        raise DataError(
            f"{where}: an image is an Image, a uint8 array [height, width, 3] or a Pillow image, not {what}; change it"
        )
    check_size(rgb.shape[1], rgb.shape[0], where)
    return image if isinstance(image, Image) else Image(rgb.copy())


def from_pil(pil: PIL.Image.Image, where: str = "image") -> Image:
    """Converts a Pillow image of any mode; a file opened by Pillow is turned upright by its EXIF orientation.

    Raises DataError as `check_size` does, and for values that have no defined 8-bit range.
    """
    check_size(*pil.size, where)
    pil.load()  # first: while loading, Pillow turns TIFF files itself and then forgets their orientation
    turn = _UPRIGHT.get(pil.getexif().get(_EXIF_ORIENTATION, 1))
    return Image(_rgb(pil if turn is None else pil.transpose(turn), where))


def _rgb(pil: PIL.Image.Image, where: str) -> np.ndarray:
    """Pixels of a Pillow image, uint8 [height, width, 3]."""
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
    """Converts [height, width] of 0..65535 to uint8 [height, width, 3], rounding to nearest; Pillow itself would
    clip.
    """
    if grey.min() < 0 or grey.max() > 65535:
        raise DataError(f"{where}: pixels of 32 bits have no defined range; save the image with 8 or 16 bits")
    grey8 = ((grey * 255 + 32767) // 65535).astype(np.uint8)
    return np.repeat(grey8[:, :, None], 3, axis=2)
