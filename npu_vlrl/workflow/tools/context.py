"""The context of a tool call, and the error by which a tool refuses one."""

from __future__ import annotations

from dataclasses import dataclass

from npu_vlrl.types import Image, Task
from npu_vlrl.workflow.tools.frame import Frame, ToolError

__all__ = ["MAX_PIXELS", "ToolContext", "ToolError", "check_pixels"]

MAX_PIXELS = 2**24
"""Limit of an image that a tool enlarges; without it a model could double the size with every call."""


@dataclass(frozen=True)
class ToolContext:
    """The episode as a tool sees it.

    Example: `ToolContext(task, images=task.images).image(0)`
    """

    task: Task
    images: tuple[Image, ...]
    """All images of the trajectory, in the order the model saw them; a tool's first result gets number len(images)."""
    frames: tuple[Frame, ...] = ()
    """Frame of each image as the model saw it; empty when it saw them as they are stored."""

    def image(self, number: int) -> Image:
        """Raises ToolError when there is no image of that number (there are no negative ones)."""
        if 0 <= number < len(self.images):
            return self.images[number]
        there = f"they are numbered 0 to {len(self.images) - 1}" if self.images else "there are none"
        raise ToolError(f"there is no image {number} ({there})")

    def frame(self, number: int) -> Frame:
        """Maps positions that the model gave to pixels of `image(number)`; raises ToolError as `image` does."""
        image = self.image(number)
        return self.frames[number] if self.frames else Frame.unchanged(image.size)


def check_pixels(width: float, height: float, remedy: str) -> None:
    """Raises ToolError, with the limit and the `remedy`, when a result would have more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise ToolError(
            f"the result would have {width * height / 1e6:.1f} million pixels; the limit is {MAX_PIXELS / 1e6:.1f} "
            f"million. {remedy}"
        )
