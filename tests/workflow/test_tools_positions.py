"""Positions from 0 to 1000, as Qwen3-VL writes them, whatever the size of an image."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.types import Image, Task, ToolCall, ToolResult
from npu_vlrl.workflow.environments.visual_qa import seen_frame
from npu_vlrl.workflow.tools import TOOLS, Frame, Toolbox, ToolContext, ToolError, on_scale
from npu_vlrl.workflow.tools.schema import PIXELS
from npu_vlrl.workflow.tools.worker import pack, unpack

PROCESSOR = ImageProcessor(min_pixels=64 * 64, max_pixels=256 * 256, patch_size=16)
BOX = Toolbox(list(TOOLS))
RELATIVE = "from 0 to 1000 over the width and height of the image"


def run(name: str, arguments: dict, size: tuple[int, int]) -> ToolResult:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image(pixels)
    frame = dataclasses.replace(seen_frame(PROCESSOR, image), scale=1000)
    return BOX.run(ToolCall(name, arguments), ToolContext(Task("t", (), None, "x"), (image,), (frame,)))


def test_by_hand() -> None:
    frame = Frame((100, 50), (100, 50), (64, 32), 1000)
    assert frame.box((500, 0, 1000, 500)) == (50, 0, 100, 25)
    assert frame.box((0, 0, 1000, 1000)) == (0, 0, 100, 50)
    assert frame.box((333, 333, 334, 334)) == (33, 16, 34, 17)  # 33.3..33.4 and 16.65..16.7
    assert frame.point((1000, 1000)) == (99, 49)
    assert frame.point((250, 500)) == (25, 25)
    in_pixels = dataclasses.replace(frame, scale=None)
    assert in_pixels.box((32, 0, 64, 16)) == (50, 0, 100, 25)
    assert frame.length(2) == in_pixels.length(2) == 4, "lines stay two seen pixels thick"


def test_the_same_numbers_mean_something_else_in_pixels() -> None:
    frame = Frame((1000, 500), (1000, 500), (1024, 512), 1000)
    assert frame.box((100, 100, 300, 300)) == (100, 50, 300, 150)
    assert dataclasses.replace(frame, scale=None).box((100, 100, 300, 300)) == (97, 97, 293, 293)


@given(st.integers(1, 900), st.integers(1, 900), st.data())
@settings(max_examples=50, deadline=None)
def test_the_stored_pixels_of_a_box_are_those_it_touches(width: int, height: int, data: st.DataObject) -> None:
    """Brute force over columns and rows, in whole numbers."""
    frame = Frame((width, height), (width, height), (64, 96), 1000)
    edges = []
    for _ in range(2):
        low = data.draw(st.integers(0, 999))
        edges.append((low, data.draw(st.integers(low + 1, 1000))))
    left, top, right, bottom = frame.box((edges[0][0], edges[1][0], edges[0][1], edges[1][1]))
    for stored, (low, high), found in ((width, edges[0], (left, right)), (height, edges[1], (top, bottom))):
        touched = [i for i in range(stored) if i * 1000 < high * stored and (i + 1) * 1000 > low * stored]
        assert (touched[0], touched[-1] + 1) == found


def test_tools_use_it() -> None:
    whole = {"bbox": [0, 0, 1000, 1000]}
    assert run("crop", whole, (200, 100)).images[0].size == (200, 100)
    assert run("crop", {"bbox": [250, 500, 750, 1000]}, (200, 100)).images[0].size == (100, 50)
    seen = seen_frame(PROCESSOR, Image(np.zeros((100, 200, 3), np.uint8))).seen
    zoomed = run("zoom", {"bbox": [250, 500, 750, 1000], "factor": 3}, (200, 100)).images[0]
    assert zoomed.size == (3 * seen[0] // 2, 3 * seen[1] // 2), "three times as large as it was seen"
    drawn = run("draw_bbox", {"bbox": [500, 500, 1000, 1000]}, (200, 100)).images[0].rgb
    assert drawn[50, 100].tolist() == drawn[99, 199].tolist() == [255, 0, 0] != drawn[49, 99].tolist()
    line = run("draw_line", {"start": [0, 0], "end": [1000, 0]}, (200, 100)).images[0].rgb
    assert (line[0] == (255, 0, 0)).all() and not (line[50] == (255, 0, 0)).all(axis=-1).any()


def test_what_is_refused_names_the_scale() -> None:
    frame = Frame((100, 50), (100, 50), (64, 32), 1000)
    with pytest.raises(ToolError, match=r"inside \[0, 0, 1000, 1000\], at least 1 wide and high"):
        frame.box((0, 0, 1001, 500))
    with pytest.raises(ToolError, match=r"at least 1 wide and high"):
        frame.box((10, 0, 10.5, 500))
    with pytest.raises(ToolError, match=r"from \[0, 0\] to \[1000, 1000\]"):
        frame.point((0, 1000.5))
    with pytest.raises(ToolError, match=r"the box \[600, 0, 1000, 10\] lies in the white beside the picture"):
        Frame((3, 900), (5, 900), (32, 896), 1000).box((600, 0, 1000, 10))


def test_the_model_is_told() -> None:
    before = BOX.schemas()
    kept = copy.deepcopy(before)
    after = [on_scale(schema, 1000) for schema in before]
    assert before == kept, "the schemas of other models stay"
    assert PIXELS in json.dumps(before) and PIXELS not in json.dumps(after) and RELATIVE not in json.dumps(before)
    for old, new in zip(before, after, strict=True):
        assert json.loads(json.dumps(new).replace(RELATIVE, PIXELS)) == old
    told = {
        (schema["function"]["name"], name): parameter["description"]
        for schema in after
        for name, parameter in schema["function"]["parameters"]["properties"].items()
        if parameter["type"] == "array"
    }
    assert {key for key, text in told.items() if RELATIVE in text} == told.keys() - {("draw_line", "end")}
    assert told["draw_line", "start"] == f"x and y of one end {RELATIVE}."
    assert told["crop", "bbox"] == f"left, top, right and bottom edge {RELATIVE}."


def test_a_parameter_without_description_stays_without() -> None:
    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}}
    assert on_scale(schema, 1000) == schema


def test_a_users_tool_gets_the_scale() -> None:
    frames = (Frame((1, 2), (3, 4), (5, 6), 1000), Frame((1, 2), (3, 4), (5, 6)))
    image = Image(np.zeros((2, 1, 3), np.uint8))
    content, images = pack(ToolContext(Task("t", (), None, "x"), (image, image), frames))
    assert unpack(json.loads(json.dumps(content)), images).frames == frames
