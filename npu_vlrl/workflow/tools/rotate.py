"""Turns a picture."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image as Pillow

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext, ToolError

MAX_PIXELS = 2**24
"""Each slanted turn enlarges the canvas; without a limit a model could double the picture with every call."""


def rotate(ctx: ToolContext, angle: float, image: int = 0) -> ToolResult:
    """Rotate an image counter-clockwise and show the result, which becomes a new image.

    The whole picture is kept; corners that appear are white.

    Args:
        angle: Degrees, counter-clockwise; negative values turn clockwise.
        image: Number of the image to rotate; 0 is the first one shown.
    """
    source = ctx.image(image)
    angle = float(angle)
    _check_size(source, angle)
    # Pillow turns multiples of 90 degrees by moving pixels, so that these are exact.
    turned = Pillow.fromarray(source.rgb).rotate(
        angle % 360.0, resample=Pillow.Resampling.BICUBIC, expand=True, fillcolor=(255, 255, 255)
    )
    text = f"Image {len(ctx.images)} is image {image} rotated by {angle:g} degrees counter-clockwise."
    return ToolResult(text, (Image(np.array(turned)),))


def _check_size(source: Image, angle: float) -> None:
    width, height = source.size
    cosine, sine = abs(math.cos(math.radians(angle))), abs(math.sin(math.radians(angle)))
    pixels = (width * cosine + height * sine) * (width * sine + height * cosine)
    if pixels > MAX_PIXELS:
        raise ToolError(
            f"the rotated image would have {pixels / 1e6:.1f} million pixels; the limit is {MAX_PIXELS / 1e6:.1f} "
            "million. Rotate an earlier image by the whole angle instead"
        )
