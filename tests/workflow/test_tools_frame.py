"""Boxes and points in the pixels that a model sees, against the real preprocessing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.types import Image, Task, ToolCall, ToolResult
from npu_vlrl.workflow.environments.visual_qa import seen_frame
from npu_vlrl.workflow.tools import Frame, Toolbox, ToolContext, ToolError

PROCESSOR = ImageProcessor(min_pixels=56 * 56, max_pixels=168 * 168, mean=(0, 0, 0), std=(1, 1, 1))
BOX = Toolbox(["draw_bbox", "draw_line", "crop", "zoom"])


def as_seen(image: Image) -> np.ndarray:
    """uint8 [height, width, 3]: the image that the model's patches show."""
    described = PROCESSOR.describe(image)
    _, rows, columns = described.grid
    patches = PROCESSOR.patches(described).numpy().reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)
    pixels = patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 14, columns * 14, 3)
    return np.rint(pixels * 255).astype(np.uint8)


def test_the_reference_image_is_what_is_stored_where_nothing_is_resized() -> None:
    image = Image(np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8))
    assert np.array_equal(as_seen(image), image.rgb)
    assert seen_frame(PROCESSOR, image) == Frame.unchanged((84, 56))


def run(name: str, arguments: dict, image: Image, frame: Frame | None = None) -> ToolResult:
    frame = seen_frame(PROCESSOR, image) if frame is None else frame
    return BOX.run(ToolCall(name, arguments), ToolContext(Task("t", (), None, "x"), (image,), (frame,)))


def changed(before: Image, after: Image) -> tuple[int, int, int, int]:
    """The seen box (left, top, right, bottom) of what differs."""
    differs = np.abs(as_seen(before).astype(int) - as_seen(after)).max(axis=2) > 40
    rows, columns = np.nonzero(differs.any(axis=1))[0], np.nonzero(differs.any(axis=0))[0]
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


sizes = st.tuples(st.integers(12, 400), st.integers(12, 400))


@st.composite
def images_and_boxes(draw: st.DrawFn) -> tuple[Image, tuple[int, int, int, int]]:
    width, height = draw(sizes)
    image = Image(np.full((height, width, 3), 128, np.uint8))
    edges = []
    for limit in seen_frame(PROCESSOR, image).seen:
        low = draw(st.integers(0, limit - 1))
        edges.append((low, draw(st.integers(low + 1, limit))))
    return image, (edges[0][0], edges[1][0], edges[0][1], edges[1][1])


def blur(frame: Frame) -> list[float]:
    """Seen pixels that the edge of a stored pixel may be off and smeared by bicubic resizing, for x and y."""
    return [1 + 3 * max(1.0, seen / stored) for seen, stored in zip(frame.seen, frame.stored, strict=True)]


def off(found: tuple[int, ...], box: tuple[int, ...], frame: Frame) -> bool:
    return any(abs(f - b) > blur(frame)[i % 2] for i, (f, b) in enumerate(zip(found, box, strict=True)))


@given(images_and_boxes())
@settings(max_examples=50, deadline=None)
def test_a_drawn_box_is_seen_where_it_was_asked_for(example: tuple[Image, tuple[int, int, int, int]]) -> None:
    image, box = example
    result = run("draw_bbox", {"bbox": list(box)}, image)
    assert not result.error
    assert result.images[0].size == image.size
    assert not off(changed(image, result.images[0]), box, seen_frame(PROCESSOR, image))


@pytest.mark.parametrize("size", [(400, 90), (90, 400), (20, 31)])
def test_without_the_mapping_the_box_is_seen_elsewhere(size: tuple[int, int]) -> None:
    """The check of the test above can fail: coordinates taken as stored pixels, or one factor for both axes."""
    image = Image(np.full((size[1], size[0], 3), 128, np.uint8))
    frame = seen_frame(PROCESSOR, image)
    box = (frame.seen[0] // 2, frame.seen[1] // 2, frame.seen[0], frame.seen[1])
    good = run("draw_bbox", {"bbox": list(box)}, image)
    assert not off(changed(image, good.images[0]), box, frame)
    wrong = run("draw_bbox", {"bbox": list(box)}, image, Frame(size, size, (1000, 1000)))
    assert off(changed(image, wrong.images[0]), box, frame)


@given(images_and_boxes())
@settings(max_examples=50, deadline=None)
def test_the_stored_pixels_of_a_box_are_those_it_touches(example: tuple[Image, tuple[int, int, int, int]]) -> None:
    """Brute force over columns and rows, in whole numbers."""
    image, box = example
    frame = seen_frame(PROCESSOR, image)
    left, top, right, bottom = frame.box(box)
    for axis, low, high, found in ((0, box[0], box[2], (left, right)), (1, box[1], box[3], (top, bottom))):
        seen, stored = frame.seen[axis], image.size[axis]
        touched = [i for i in range(stored) if i * seen < high * stored and (i + 1) * seen > low * stored]
        assert (touched[0], touched[-1] + 1) == found
    cut = run("crop", {"bbox": list(box)}, image).images[0]
    assert cut.size == (right - left, bottom - top)


@given(sizes, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_the_ends_of_a_line_are_seen_where_they_were_asked_for(
    size: tuple[int, int], ax: float, ay: float, bx: float, by: float
) -> None:
    image = Image(np.full((size[1], size[0], 3), 128, np.uint8))
    frame = seen_frame(PROCESSOR, image)
    start, end = [ax * frame.seen[0], ay * frame.seen[1]], [bx * frame.seen[0], by * frame.seen[1]]
    result = run("draw_line", {"start": start, "end": end}, image)
    assert result.error == (math.dist(start, end) < 1)
    assume(not result.error)
    box = (min(start[0], end[0]), min(start[1], end[1]), max(start[0], end[0]), max(start[1], end[1]))
    found = changed(image, result.images[0])
    for i, (f, b) in enumerate(zip(found, box, strict=True)):
        assert abs(f - b) <= blur(frame)[i % 2] + 2 * max(1.0, frame.seen[1 - i % 2] / size[1 - i % 2])
    for x, y in (start, end):
        column, row = frame.point((x, y))
        assert tuple(result.images[0].rgb[row, column]) == (255, 0, 0)
        assert column <= x * size[0] / frame.seen[0] + 1e-9 and row <= y * size[1] / frame.seen[1] + 1e-9


def test_by_hand() -> None:
    frame = Frame((100, 50), (100, 50), (56, 28))
    assert frame.box((28, 0, 56, 28)) == (50, 0, 100, 50)
    assert frame.box((1, 1, 2, 2)) == (1, 1, 4, 4)  # 1.79..3.57 in both directions
    assert frame.point((0, 0)) == (0, 0)
    assert frame.point((28, 14)) == (50, 25)
    assert frame.point((56, 28)) == (99, 49)  # the border belongs to the last pixel
    assert frame.length(2) == 4  # 3.57
    assert Frame((10, 10), (10, 10), (56, 56)).length(2) == 1
    assert [float(x) for x in frame.region((7, 7, 14, 14))] == [12.5, 12.5, 25.0, 25.0]


def test_a_seventh_is_exact() -> None:
    """In floating point, 49 * (100 / 49) is not 100 for each of these, and a ceiling takes the next pixel."""
    assert any(math.ceil(seen * (stored / seen)) != stored for seen in range(1, 99) for stored in range(1, 99))
    for seen in range(1, 99):
        for stored in range(1, 99):
            assert Frame((stored, 1), (stored, 1), (seen, 1)).box((0, 0, seen, 1)) == (0, 0, stored, 1)


@pytest.mark.parametrize(
    "box",
    [
        (-1, 0, 5, 5),
        (0, -0.5, 5, 5),
        (0, 0, 57, 5),
        (0, 0, 5, 28.01),
        (5, 0, 4, 5),
        (5, 5, 5, 9),
        (0, 9, 5, 3),
        (0, 0, 0.9, 5),
        (0, 0, 5, 0.9),
        (0, 0, 1e300, 5),
        (-1e300, 0, 5, 5),
    ],
)
def test_boxes_that_are_refused_name_the_limits(box: tuple[float, float, float, float]) -> None:
    with pytest.raises(ToolError, match=r"must be \[left, top, right, bottom\] inside \[0, 0, 56, 28\], at least 1"):
        Frame((100, 50), (100, 50), (56, 28)).box(box)


@pytest.mark.parametrize("point", [(-1, 0), (0, -0.1), (56.1, 0), (0, 29), (1e300, 0)])
def test_points_that_are_refused_name_the_limits(point: tuple[float, float]) -> None:
    with pytest.raises(ToolError, match=r"must be \[x, y\] from \[0, 0\] to \[56, 28\]"):
        Frame((100, 50), (100, 50), (56, 28)).point(point)


def test_the_white_beside_a_narrow_image_is_no_part_of_it() -> None:
    """3 x 900 pixels are padded to 5 x 900: of 28 seen columns the first 16.8 are image."""
    image = Image(np.zeros((900, 3, 3), np.uint8))
    frame = seen_frame(PROCESSOR, image)
    assert (frame.canvas, frame.seen[0]) == ((5, 900), 28)
    assert (as_seen(image)[:, :14] < 60).all() and (as_seen(image)[:, 20:] > 250).all()
    assert frame.box((0, 0, 28, frame.seen[1])) == (0, 0, 3, 900)
    assert frame.box((14, 0, 20, frame.seen[1])) == (2, 0, 3, 900)
    assert frame.point((28, 0)) == (2, 0)
    with pytest.raises(ToolError, match="lies in the white beside the picture"):
        frame.box((17, 0, 28, 100))
    zoomed = run("zoom", {"bbox": [0, 0, 28, 56], "factor": 2}, image).images[0]
    assert zoomed.size == (34, 112) and (zoomed.rgb == 0).all()  # 16.8 x 56, twice


@given(sizes, st.data())
@settings(max_examples=30, deadline=None)
def test_a_zoomed_box_has_the_size_it_is_said_to_have(size: tuple[int, int], data: st.DataObject) -> None:
    image = Image(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    wide, high = seen_frame(PROCESSOR, image).seen
    left, top = data.draw(st.integers(0, wide - 1)), data.draw(st.integers(0, high - 1))
    right, bottom = data.draw(st.integers(left + 1, wide)), data.draw(st.integers(top + 1, high))
    factor = data.draw(st.sampled_from([1, 1.5, 2, 8]))
    result = run("zoom", {"bbox": [left, top, right, bottom], "factor": factor}, image)
    assert result.images[0].size == (round((right - left) * factor), round((bottom - top) * factor))
