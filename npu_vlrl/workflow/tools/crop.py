"""Tool that cuts a part out of an image."""

from __future__ import annotations

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext


def crop(ctx: ToolContext, bbox: tuple[float, float, float, float], image: int = 0) -> ToolResult:
    """Cut a box out of an image and show it, which becomes a new image.

    Args:
        bbox: left, top, right and bottom edge in pixels of the image as you see it.
        image: Number of the image to cut from; 0 is the first one shown.
    """
    left, top, right, bottom = ctx.frame(image).box(bbox)
    text = f"Image {len(ctx.images)} is the box cut out of image {image}."
    return ToolResult(text, (Image(ctx.image(image).rgb[top:bottom, left:right].copy()),))
