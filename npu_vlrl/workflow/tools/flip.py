"""Tool that mirrors an image."""

from __future__ import annotations

from typing import Literal

import numpy as np

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext


def flip(ctx: ToolContext, direction: Literal["horizontal", "vertical"], image: int = 0) -> ToolResult:
    """Mirror an image and show the result, which becomes a new image.

    Args:
        direction: horizontal exchanges left and right, vertical exchanges top and bottom.
        image: Number of the image to mirror; 0 is the first one shown.
    """
    mirrored = np.flip(ctx.image(image).rgb, axis=1 if direction == "horizontal" else 0)
    text = f"Image {len(ctx.images)} is image {image} flipped {direction}ly."
    return ToolResult(text, (Image(np.ascontiguousarray(mirrored)),))
