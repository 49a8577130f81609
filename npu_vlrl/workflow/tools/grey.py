"""Takes the colours out of an image."""

from __future__ import annotations

import numpy as np

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext


def grey(ctx: ToolContext, image: int = 0) -> ToolResult:
    """Show an image without colours, which becomes a new image.

    Args:
        image: Number of the image; 0 is the first one shown.
    """
    mean = ctx.image(image).rgb.mean(axis=2, keepdims=True).round().astype(np.uint8)
    return ToolResult(f"Image {len(ctx.images)} is image {image} in grey.", (Image(mean.repeat(3, axis=2)),))
