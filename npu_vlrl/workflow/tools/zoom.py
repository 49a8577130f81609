"""Tool that enlarges a part of an image."""

from __future__ import annotations

import numpy as np
from PIL import Image as Pillow

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext, ToolError, check_pixels

MAX_FACTOR = 8.0


def zoom(ctx: ToolContext, bbox: tuple[float, float, float, float], factor: float = 2.0, image: int = 0) -> ToolResult:
    """Enlarge a box of an image, with all the detail that the image has, and show it, which becomes a new image.

    Args:
        bbox: left, top, right and bottom edge in pixels of the image as you see it.
        factor: From 1 to 8; how many times wider and higher the box becomes than you see it now.
        image: Number of the image; 0 is the first one shown.
    """
    if not 1 <= factor <= MAX_FACTOR:
        raise ToolError(f"the factor must be from 1 to {MAX_FACTOR:g}, not {factor:g}")
    frame = ctx.frame(image)
    left, top, right, bottom = frame.region(bbox)
    width, height = (
        max(1, round(float(span * frame.seen[axis] / frame.canvas[axis]) * factor))
        for axis, span in enumerate((right - left, bottom - top))
    )
    check_pixels(width, height, "Use a smaller box or a smaller factor")
    enlarged = Pillow.fromarray(ctx.image(image).rgb).resize(
        (width, height), Pillow.Resampling.BICUBIC, box=(float(left), float(top), float(right), float(bottom))
    )
    text = f"Image {len(ctx.images)} is the box of image {image}, enlarged {factor:g} times."
    return ToolResult(text, (Image(np.array(enlarged)),))
