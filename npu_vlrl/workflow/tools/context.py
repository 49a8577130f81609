"""What a tool may see, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass

from npu_vlrl.types import Image, Task


class ToolError(ValueError):
    """The model asked for something impossible; the message is told to the model."""


@dataclass(frozen=True)
class ToolContext:
    """The episode as a tool sees it.

    Example: `ToolContext(task, images=task.images).image(0)`
    """

    task: Task
    images: tuple[Image, ...]
    """All images of the trajectory, in the order the model saw them; a tool's first result gets number len(images)."""

    def image(self, number: int) -> Image:
        """Raises ToolError when there is no image of that number (there are no negative ones)."""
        if 0 <= number < len(self.images):
            return self.images[number]
        there = f"they are numbered 0 to {len(self.images) - 1}" if self.images else "there are none"
        raise ToolError(f"there is no image {number} ({there})")
