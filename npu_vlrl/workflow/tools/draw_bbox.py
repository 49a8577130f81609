"""Tool that marks a box in an image."""

from __future__ import annotations

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext, ToolError

RED = (255, 0, 0)
THICKNESS = 2
"""Thickness of lines, in pixels as the model sees them."""

MAX_LABEL = 40
_TEXT_HEIGHT = 12
_MAX_FONT = 200
"""Limit in stored pixels: a huge image that is seen small needs huge letters, which take time."""


def draw_bbox(ctx: ToolContext, bbox: tuple[float, float, float, float], label: str = "", image: int = 0) -> ToolResult:
    """Draw a red box into a copy of an image and show it, which becomes a new image.

    Args:
        bbox: left, top, right and bottom edge in pixels of the image as you see it.
        label: Up to 40 characters, written above the box.
        image: Number of the image to draw into; 0 is the first one shown.
    """
    if len(label) > MAX_LABEL or not label.isprintable():
        raise ToolError(f"the label must be one line of at most {MAX_LABEL} printable characters")
    frame, source = ctx.frame(image), ctx.image(image).rgb
    left, top, right, bottom = frame.box(bbox)
    thickness = frame.length(THICKNESS)
    drawn = source.copy()
    drawn[top:bottom, left:right] = RED
    if right - left > 2 * thickness and bottom - top > 2 * thickness:
        inside = np.s_[top + thickness : bottom - thickness, left + thickness : right - thickness]
        drawn[inside] = source[inside]
    if label.strip():
        drawn = _write(drawn, label.strip(), (left, top), min(frame.length(_TEXT_HEIGHT), _MAX_FONT))
    named = f" and the label {label.strip()!r}" if label.strip() else ""
    text = f"Image {len(ctx.images)} is image {image} with the box{named}."
    return ToolResult(text, (Image(drawn),))


def _write(rgb: np.ndarray, label: str, corner: tuple[int, int], size: int) -> np.ndarray:
    """White text on red, `size` pixels high, over `corner` (left, top) of the box, or below it where there is no room.

    uint8 [height, width, 3] to the same.
    """
    pil = Pillow.fromarray(rgb)
    font = ImageFont.load_default(size)
    x1, y1, x2, y2 = font.getbbox(label)
    width, height = x2 - x1 + 2, y2 - y1 + 2
    left = max(0, min(corner[0], pil.width - round(width)))
    top = corner[1] - height if corner[1] >= height else corner[1]
    draw = ImageDraw.Draw(pil)
    draw.rectangle((left, top, left + width - 1, top + height - 1), fill=RED)
    draw.text((left + 1 - x1, top + 1 - y1), label, fill=(255, 255, 255), font=font)
    return np.array(pil)
