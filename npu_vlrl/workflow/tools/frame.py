"""Conversion of the positions that a model writes to pixels of the stored image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


class ToolError(ValueError):
    """The model asked for something impossible; the message is told to the model."""


@dataclass(frozen=True)
class Frame:
    """Geometry of an image that a model sees resized.

    Each axis is resized by its own factor, perhaps after white was added at the right and below.

    Positions are edges: column i of W spans i to i + 1, so that 0 and W are the borders. A model gives them in pixels
    as it sees them, or on a scale of its own. All sizes are (width, height) in pixels.

    Example: `Frame((100, 50), (100, 50), (56, 28)).box((28, 0, 56, 28)) == (50, 0, 100, 50)`
    """

    stored: tuple[int, int]
    canvas: tuple[int, int]
    """Size of the stored image with the added white; all of it became `seen`."""
    seen: tuple[int, int]
    scale: int | None = None
    """The number that the model writes for the right and the lower border, whatever the size; None: the seen pixels."""

    @classmethod
    def unchanged(cls, size: tuple[int, int]) -> Frame:
        """The frame of an image that is seen as it is stored."""
        return cls(size, size, size)

    def region(self, box: Sequence[float]) -> tuple[Fraction, Fraction, Fraction, Fraction]:
        """A box (left, top, right, bottom) that the model gave as stored edges, exact, without the added white.

        Raises ToolError when the box leaves the image or is less than 1 wide or high.
        """
        left, top, right, bottom = box
        width, height = self._borders
        inside = min(left, top) >= 0 and right <= width and bottom <= height
        if not inside or right - left < 1 or bottom - top < 1:
            raise ToolError(
                f"the box {_show(box)} must be [left, top, right, bottom] inside [0, 0, {width}, {height}], at least "
                "1 wide and high"
            )
        x1, x2 = self._stored(left, 0), self._stored(right, 0)
        y1, y2 = self._stored(top, 1), self._stored(bottom, 1)
        if x1 >= self.stored[0] or y1 >= self.stored[1]:
            raise ToolError(f"the box {_show(box)} lies in the white beside the picture; choose one inside the picture")
        return x1, y1, min(x2, Fraction(self.stored[0])), min(y2, Fraction(self.stored[1]))

    def box(self, box: Sequence[float]) -> tuple[int, int, int, int]:
        """The stored pixels that a box touches: left, top, right, bottom, the last two exclusive."""
        left, top, right, bottom = self.region(box)
        return math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)

    def point(self, point: Sequence[float]) -> tuple[int, int]:
        """The stored pixel (column, row) at a point; raises ToolError for a point outside."""
        width, height = self._borders
        if not (0 <= point[0] <= width and 0 <= point[1] <= height):
            raise ToolError(f"the point {_show(point)} must be [x, y] from [0, 0] to [{width}, {height}]")
        x, y = (min(math.floor(self._stored(value, axis)), self.stored[axis] - 1) for axis, value in enumerate(point))
        return x, y

    def length(self, pixels: int) -> int:
        """Stored pixels, at least one, of something that shall look at least `pixels` thick."""
        return max(math.ceil(Fraction(pixels * self.canvas[axis], self.seen[axis])) for axis in (0, 1))

    @property
    def _borders(self) -> tuple[int, int]:
        """Right and lower border as the model writes them."""
        return self.seen if self.scale is None else (self.scale, self.scale)

    def _stored(self, value: float, axis: int) -> Fraction:
        return Fraction(value) * self.canvas[axis] / self._borders[axis]


def _show(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"
