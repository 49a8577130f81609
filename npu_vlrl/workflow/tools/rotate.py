"""Tool that turns an image."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image as Pillow

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext, check_pixels


def rotate(ctx: ToolContext, angle: float, image: int = 0, expand: bool = True) -> ToolResult:
    """Rotate an image counter-clockwise and show the result, which becomes a new image. New corners are white.

    Args:
        angle: Degrees, counter-clockwise; negative values turn clockwise.
        image: Number of the image to rotate; 0 is the first one shown.
        expand: true keeps the whole picture on a larger canvas; false keeps the size and cuts the corners off.
    """
    source = ctx.image(image)
    angle = float(angle)
    if expand:
        check_pixels(*_canvas(source, angle), "Use expand=false, or rotate an earlier image by the whole angle")
    # Pillow turns multiples of 90 degrees by moving pixels where the size allows it, so that these are exact.
    turned = Pillow.fromarray(source.rgb).rotate(
        angle % 360.0, resample=Pillow.Resampling.BICUBIC, expand=expand, fillcolor=(255, 255, 255)
    )
    text = f"Image {len(ctx.images)} is image {image} rotated by {angle:g} degrees counter-clockwise."
    return ToolResult(text, (Image(np.array(turned)),))


def _canvas(source: Image, angle: float) -> tuple[float, float]:
    """Width and height that hold the whole turned image."""
    width, height = source.size
    cosine, sine = abs(math.cos(math.radians(angle))), abs(math.sin(math.radians(angle)))
    return width * cosine + height * sine, width * sine + height * cosine
