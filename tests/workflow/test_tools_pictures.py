"""The built-in tools that make an image of an image: pixel by pixel, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image as Pillow

from npu_vlrl.types import Image, Task, ToolCall, ToolResult
from npu_vlrl.workflow.tools import TOOLS, Frame, Toolbox, ToolContext
from npu_vlrl.workflow.tools.context import MAX_PIXELS
from npu_vlrl.workflow.tools.schema import function_schema

RNG = np.random.default_rng(0)
BOX = Toolbox(list(TOOLS))
RED = (255, 0, 0)


def noise(height: int, width: int) -> Image:
    return Image(RNG.integers(0, 250, (height, width, 3), dtype=np.uint8))


def run(name: str, arguments: dict, *images: Image, frames: tuple[Frame, ...] = ()) -> ToolResult:
    return BOX.run(ToolCall(name, arguments), ToolContext(Task("t", (), None, "x"), images, frames))


def red(image: Image) -> np.ndarray:
    return (image.rgb == RED).all(axis=2)


@pytest.mark.parametrize(("direction", "flipped"), [("horizontal", np.fliplr), ("vertical", np.flipud)])
def test_flip(direction: str, flipped: object) -> None:
    first, second = noise(3, 5), noise(4, 7)
    result = run("flip", {"direction": direction, "image": 1}, first, second)
    assert np.array_equal(result.images[0].rgb, flipped(second.rgb))  # type: ignore[operator]
    assert result.text == f"Image 2 is image 1 flipped {direction}ly."
    again = run("flip", {"direction": direction}, *result.images)
    assert again.images[0] == second
    told = run("flip", {"direction": "diagonal"}, first)
    assert told.error and "must be one of 'horizontal', 'vertical', not 'diagonal'" in told.text


def test_crop() -> None:
    image = noise(40, 60)
    result = run("crop", {"bbox": [10, 5, 30, 40]}, image)
    assert np.array_equal(result.images[0].rgb, image.rgb[5:40, 10:30])
    assert result.text == "Image 1 is the box cut out of image 0."
    assert not np.shares_memory(result.images[0].rgb, image.rgb)  # so that the large image can be freed
    frame = Frame((60, 40), (60, 40), (30, 20))  # seen at half the size
    half = run("crop", {"bbox": [5, 2.5, 15, 20]}, image, frames=(frame,))
    assert half.images == result.images


def test_zoom_shows_the_detail_of_the_stored_image() -> None:
    image = noise(40, 60)
    frame = Frame((60, 40), (60, 40), (30, 20))
    result = run("zoom", {"bbox": [5, 2, 15, 12], "factor": 2}, image, frames=(frame,))
    assert np.array_equal(result.images[0].rgb, image.rgb[4:24, 10:30])  # twice what is seen is what is stored
    assert result.text == "Image 1 is the box of image 0, enlarged 2 times."
    larger = run("zoom", {"bbox": [10, 4, 30, 24], "factor": 3}, image)
    expected = Pillow.fromarray(image.rgb).resize((60, 60), Pillow.Resampling.BICUBIC, box=(10, 4, 30, 24))
    assert np.array_equal(larger.images[0].rgb, np.asarray(expected))
    assert run("zoom", {"bbox": [0, 0, 10, 10]}, image).images[0].size == (20, 20)
    tiny = run("zoom", {"bbox": [3, 3, 4, 4], "factor": 8}, image)
    assert tiny.images[0].size == (8, 8)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"bbox": [0, 0, 9, 9], "factor": 0.5}, "the factor must be from 1 to 8, not 0.5"),
        ({"bbox": [0, 0, 9, 9], "factor": 9}, "the factor must be from 1 to 8, not 9"),
        ({"bbox": [0, 0, 9, 9], "factor": -1}, "the factor must be from 1 to 8"),
        ({"bbox": [0, 0, 0, 0]}, "the box [0, 0, 0, 0] must be [left, top, right, bottom] inside [0, 0, 3000, 2000]"),
        ({"bbox": [0, 0, 0.001, 5]}, "at least 1 wide and high"),
        (
            {"bbox": [0, 0, 3000, 2000], "factor": 2},
            "24.0 million pixels; the limit is 16.8 million. Use a smaller box",
        ),
        ({"bbox": [0, 0, 9]}, "'bbox' must have 4 items, not 3"),
        ({"bbox": [0, 0, 9, "9"]}, "'bbox[3]' must be a number, not '9'"),
        ({}, "'bbox' is missing"),
    ],
)
def test_what_zoom_refuses(arguments: dict, reason: str) -> None:
    result = run("zoom", arguments, Image(np.zeros((2000, 3000, 3), np.uint8)))
    assert result.error and not result.images and reason in result.text


def test_zooming_again_and_again_ends_at_a_limit() -> None:
    image = noise(28, 28)
    for _ in range(20):
        width, height = image.size
        result = run("zoom", {"bbox": [0, 0, width, height], "factor": 8}, image)
        if result.error:
            break
        image = result.images[0]
        assert image.size[0] * image.size[1] <= MAX_PIXELS
    assert result.error and "million pixels" in result.text


def test_draw_bbox_by_hand() -> None:
    image = noise(20, 30)
    result = run("draw_bbox", {"bbox": [4, 3, 14, 10]}, image)
    expected = np.zeros((20, 30), bool)
    expected[3:10, 4:14] = True
    expected[5:8, 6:12] = False  # lines are two pixels thick
    assert np.array_equal(red(result.images[0]), expected)
    assert np.array_equal(result.images[0].rgb[~expected], image.rgb[~expected])
    assert result.text == "Image 1 is image 0 with the box."


@pytest.mark.parametrize("box", [[0, 0, 1, 1], [0, 0, 3, 20], [0, 0, 30, 4], [28, 18, 30, 20], [29, 0, 30, 20]])
def test_a_box_without_an_inside_is_filled(box: list[int]) -> None:
    image = noise(20, 30)
    marked = red(run("draw_bbox", {"bbox": box}, image).images[0])
    left, top, right, bottom = box
    assert marked[top:bottom, left:right].all() and marked.sum() == (right - left) * (bottom - top)


def test_lines_keep_their_thickness_as_seen() -> None:
    image = Image(np.zeros((200, 400, 3), np.uint8))
    frame = Frame((400, 200), (400, 200), (100, 50))
    marked = red(run("draw_bbox", {"bbox": [25, 10, 75, 40]}, image, frames=(frame,)).images[0])
    expected = np.zeros((200, 400), bool)
    expected[40:160, 100:300] = True
    expected[48:152, 108:292] = False
    assert np.array_equal(marked, expected)


def test_a_label_stands_above_the_box_or_in_it_where_there_is_no_room() -> None:
    image = Image(np.zeros((100, 100, 3), np.uint8))
    plain = run("draw_bbox", {"bbox": [30, 40, 90, 90]}, image).images[0]
    result = run("draw_bbox", {"bbox": [30, 40, 90, 90], "label": " cat "}, image)
    assert result.text == "Image 1 is image 0 with the box and the label 'cat'."
    rows, columns = np.nonzero((plain.rgb != result.images[0].rgb).any(axis=2))
    assert rows.max() < 40 and columns.min() == 30 and 20 < rows.min() < 35
    assert (result.images[0].rgb > 150).all(axis=2).sum() > 10  # white letters
    low = run("draw_bbox", {"bbox": [30, 2, 90, 90], "label": "cat"}, image).images[0]
    plain = run("draw_bbox", {"bbox": [30, 2, 90, 90]}, image).images[0]
    rows, _ = np.nonzero((plain.rgb != low.rgb).any(axis=2))
    assert rows.min() >= 2 and rows.max() < 25
    right = run("draw_bbox", {"bbox": [98, 50, 100, 90], "label": "cat"}, image).images[0]
    assert red(right)[40:49, 60:98].any()  # moved left to be read
    long = run("draw_bbox", {"bbox": [30, 40, 90, 90], "label": "m" * 40}, image)
    assert not long.error and long.images[0].size == (100, 100)
    blank = run("draw_bbox", {"bbox": [30, 40, 90, 90], "label": "  "}, image)
    assert blank.text == "Image 1 is image 0 with the box."


@pytest.mark.parametrize("label", ["x" * 41, "two\nlines", "\x00", "\ud800", "\u202e"])
def test_labels_that_are_refused(label: str) -> None:
    result = run("draw_bbox", {"bbox": [0, 0, 9, 9], "label": label}, noise(20, 20))
    assert result.error and result.text == "draw_bbox: the label must be one line of at most 40 printable characters."
    assert not run("draw_bbox", {"bbox": [0, 0, 9, 9], "label": "猫 ß"}, noise(20, 20)).error


def test_draw_line_by_hand() -> None:
    image = Image(np.zeros((20, 30, 3), np.uint8))
    frame = Frame((30, 20), (30, 20), (60, 40))  # seen twice as large, so that a line is one stored pixel thick
    across = red(run("draw_line", {"start": [8, 20], "end": [40, 20]}, image, frames=(frame,)).images[0])
    assert np.argwhere(across).tolist() == [[10, column] for column in range(4, 21)]
    slanted = red(run("draw_line", {"start": [0, 0], "end": [38, 38]}, image, frames=(frame,)).images[0])
    assert np.argwhere(slanted).tolist() == [[i, i] for i in range(20)]
    thick = run("draw_line", {"start": [5, 0], "end": [5, 20]}, image)
    assert red(thick.images[0]).sum() == 2 * 20 and thick.text == "Image 1 is image 0 with the line."
    dot = run("draw_line", {"start": [5, 5], "end": [5, 5]}, image)
    assert dot.error and "at least 1 long" in dot.text
    outside = run("draw_line", {"start": [5, 5], "end": [31, 5]}, image)
    assert outside.error and "the point [31, 5] must be [x, y] from [0, 0] to [30, 20]" in outside.text


def test_rotate_keeps_the_size_where_that_is_asked_for() -> None:
    image = noise(40, 60)
    kept = run("rotate", {"angle": 30, "expand": False}, image)
    expected = Pillow.fromarray(image.rgb).rotate(30, Pillow.Resampling.BICUBIC, fillcolor="white")
    assert np.array_equal(kept.images[0].rgb, np.asarray(expected)) and kept.images[0].size == (60, 40)
    assert run("rotate", {"angle": 30}, image).images[0].size != (60, 40)
    half = run("rotate", {"angle": 180, "expand": False}, image)
    assert np.array_equal(half.images[0].rgb, image.rgb[::-1, ::-1])
    large = Image(np.zeros((4000, 4200, 3), np.uint8))
    refused = run("rotate", {"angle": 1}, large)
    assert refused.error and "Use expand=false" in refused.text
    assert run("rotate", {"angle": 180, "expand": False}, large).images[0].size == (4200, 4000)


def test_tools_leave_the_image_that_they_work_on_alone() -> None:
    image = noise(20, 30)
    before = image.rgb.copy()
    calls: dict[str, dict] = {
        "rotate": {"angle": 10},
        "flip": {"direction": "vertical"},
        "crop": {"bbox": [0, 0, 9, 9]},
        "zoom": {"bbox": [0, 0, 9, 9]},
        "draw_bbox": {"bbox": [0, 0, 9, 9], "label": "a"},
        "draw_line": {"start": [0, 0], "end": [9, 9]},
    }
    assert set(calls) == set(TOOLS) - {"look"}
    for name, arguments in calls.items():
        result = run(name, arguments, image)
        assert not result.error and result.images[0] != image
        assert np.array_equal(image.rgb, before)
        missing = run(name, {**arguments, "image": 1}, image)
        assert missing.error and "there is no image 1 (they are numbered 0 to 0)" in missing.text


@pytest.mark.parametrize("name", TOOLS)
def test_every_parameter_is_described(name: str) -> None:
    function = function_schema(TOOLS[name])["function"]
    assert function["name"] == name and function["description"].endswith(".")
    for parameter in function["parameters"]["properties"].values():
        assert parameter["description"].endswith(".")


def test_the_schema_of_a_box() -> None:
    parameters = function_schema(TOOLS["zoom"])["function"]["parameters"]
    assert parameters["required"] == ["bbox"]
    box = parameters["properties"]["bbox"]
    assert {key: box[key] for key in ("type", "items", "minItems", "maxItems")} == {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 4,
        "maxItems": 4,
    }
    flips = function_schema(TOOLS["flip"])["function"]["parameters"]["properties"]["direction"]
    assert (flips["type"], flips["enum"]) == ("string", ["horizontal", "vertical"])
