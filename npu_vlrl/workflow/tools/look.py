"""Tool that shows the image that a task hides at first."""

from __future__ import annotations

from npu_vlrl.types import Image, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext, ToolError


def look(ctx: ToolContext) -> ToolResult:
    """Take a look: shows an image that was not visible so far."""
    hidden = ctx.task.extra.get("hidden_image")
    if not isinstance(hidden, Image):
        raise ToolError("there is nothing more to look at in this task")
    if hidden in ctx.images:
        raise ToolError("you have looked already")
    return ToolResult(f"Image {len(ctx.images)} is what you see.", (hidden,))
