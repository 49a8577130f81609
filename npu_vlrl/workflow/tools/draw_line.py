"""Tool that draws a line into an image."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext, ToolError
from npu_vlrl.workflow.tools.draw_bbox import RED, THICKNESS


def draw_line(ctx: ToolContext, start: tuple[float, float], end: tuple[float, float], image: int = 0) -> ToolResult:
    """Draw a straight red line into a copy of an image and show it, which becomes a new image.

    Args:
        start: x and y of one end in pixels of the image as you see it.
        end: x and y of the other end.
        image: Number of the image to draw into; 0 is the first one shown.
    """
    frame = ctx.frame(image)
    ends = [frame.point(start), frame.point(end)]
    if math.dist(start, end) < 1:
        raise ToolError("the line must be at least 1 long; give two different points")
    pil = Pillow.fromarray(ctx.image(image).rgb)
    draw = ImageDraw.Draw(pil)
    draw.line(ends, fill=RED, width=frame.length(THICKNESS))
    draw.line(ends, fill=RED)  # the end of a thick, slanted line is cut short of its last pixel
    text = f"Image {len(ctx.images)} is image {image} with the line."
    return ToolResult(text, (Image(np.array(pil)),))
