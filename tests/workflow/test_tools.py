"""The toolbox, its tools, and users' own tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from npu_vlrl.types import Image, Task, ToolCall, ToolResult
from npu_vlrl.workflow.tools import Toolbox, ToolContext, parse_tool_calls
from npu_vlrl.workflow.tools.context import MAX_PIXELS

RNG = np.random.default_rng(0)


def noise(height: int, width: int) -> Image:
    return Image(RNG.integers(0, 255, (height, width, 3), dtype=np.uint8))


def context(*images: Image, **extra: object) -> ToolContext:
    return ToolContext(Task("t/1", (), "5", "test", extra), images)


def run(name: str, arguments: dict, ctx: ToolContext, box: Toolbox | None = None) -> ToolResult:
    return (box or Toolbox(["rotate", "look"])).run(ToolCall(name, arguments), ctx)


@pytest.mark.parametrize(("angle", "quarters"), [(0, 0), (90, 1), (90.0, 1), (180, 2), (270, 3), (-90, 3), (450, 1)])
def test_quarter_turns_are_exact_and_counter_clockwise(angle: float, quarters: int) -> None:
    image = noise(3, 5)
    result = run("rotate", {"angle": angle}, context(image))
    assert not result.error
    assert np.array_equal(result.images[0].rgb, np.rot90(image.rgb, quarters))  # NumPy's axes turn counter-clockwise
    assert result.text == f"Image 1 is image 0 rotated by {angle:g} degrees counter-clockwise."


def test_a_slanted_turn_keeps_the_whole_image_on_white() -> None:
    black = Image(np.zeros((100, 200, 3), np.uint8))
    turned = run("rotate", {"angle": 30, "image": 1}, context(noise(4, 4), black)).images[0]
    width, height = 200 * np.cos(np.pi / 6) + 100 * 0.5, 200 * 0.5 + 100 * np.cos(np.pi / 6)
    assert turned.size == pytest.approx((width, height), abs=2)
    assert (turned.rgb[0, 0] == 255).all() and (turned.rgb[-1, -1] == 255).all()
    middle = turned.rgb.shape[0] // 2, turned.rgb.shape[1] // 2
    assert (turned.rgb[middle] == 0).all()
    assert abs(int((turned.rgb < 128).all(axis=2).sum()) - 100 * 200) < 300
    expected = Pillow.fromarray(black.rgb).rotate(30, Pillow.Resampling.BICUBIC, True, fillcolor="white")
    assert np.array_equal(turned.rgb, np.asarray(expected))


def test_turning_again_and_again_ends_at_the_limit() -> None:
    ctx = context(noise(56, 56))
    for _ in range(40):
        result = run("rotate", {"angle": 45, "image": len(ctx.images) - 1}, ctx)
        if result.error:
            break
        assert result.images[0].rgb[..., 0].size <= MAX_PIXELS * 1.01
        ctx = context(*ctx.images, *result.images)
    assert result.error and "million pixels" in result.text and not result.images


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("rotat", {}, "no tool 'rotat'. Available: rotate(angle, image, expand), look()"),
        ("", {}, "no tool ''"),
        ("rotate", {}, "'angle' is missing"),
        ("rotate", {"angle": "90"}, "'angle' must be a number, not '90'"),
        ("rotate", {"angle": None}, "'angle' must be a number"),
        ("rotate", {"angle": True}, "'angle' must be a number"),
        ("rotate", {"angle": float("inf")}, "'angle' must be a number"),
        ("rotate", {"angle": float("nan")}, "'angle' must be a number"),
        ("rotate", {"angle": 10**400}, "'angle' must be a number"),
        ("rotate", {"angle": 90, "image": 1.0}, "'image' must be an integer, not 1.0"),
        ("rotate", {"angle": 90, "image": 1}, "no image 1 (they are numbered 0 to 0)"),
        ("rotate", {"angle": 90, "image": -1}, "no image -1"),
        ("rotate", {"angle": 90, "image": 10**400}, "no image 1000"),
        ("rotate", {"angle": 90, "degrees": 1}, "'degrees' is not a parameter (there are: angle, image, expand)"),
        ("look", {}, "nothing more to look at"),
        ("look", {"image": 0}, "'image' is not a parameter (there are: none)"),
    ],
)
def test_what_a_model_gets_wrong_is_told_to_it(name: str, arguments: dict, reason: str) -> None:
    result = run(name, arguments, context(noise(4, 4)))
    assert result.error and not result.images
    assert reason in result.text


def test_no_images_at_all() -> None:
    assert "there are none" in run("rotate", {"angle": 1}, context()).text
    assert "Available: none" in run("rotate", {"angle": 1}, context(), Toolbox([])).text


def test_look_shows_the_hidden_image() -> None:
    hidden = noise(4, 6)
    result = run("look", {}, context(noise(2, 2), hidden_image=hidden))
    assert result == ToolResult("Image 1 is what you see.", (hidden,))
    assert run("look", {}, context(hidden_image="path.png")).error
    again = run("look", {}, context(hidden, hidden_image=hidden))
    assert again.error and "looked already" in again.text


def test_schemas() -> None:
    rotate, look = Toolbox(["rotate", "look"]).schemas()
    assert rotate["type"] == "function"
    assert rotate["function"]["name"] == "rotate"
    assert rotate["function"]["description"].startswith("Rotate an image counter-clockwise")
    assert "Args" not in rotate["function"]["description"]
    parameters = rotate["function"]["parameters"]
    assert parameters["required"] == ["angle"]
    assert {name: value["type"] for name, value in parameters["properties"].items()} == {
        "angle": "number",
        "image": "integer",
        "expand": "boolean",
    }
    assert "counter-clockwise" in parameters["properties"]["angle"]["description"]
    assert look["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}
    box = Toolbox(["rotate"])
    box.schemas()[0]["function"]["parameters"]["required"].clear()
    assert run("rotate", {}, context(noise(2, 2)), box).error  # a caller cannot change the tool


USER_FILE = '''
from npu_vlrl.types import ToolResult
from npu_vlrl.workflow.tools import ToolContext

def measure(ctx: ToolContext, box: tuple[float, float, float, float], name: str = "it") -> ToolResult:
    """Measure a box."""
    assert isinstance(box, tuple)
    return ToolResult(f"{name}: {box[2] - box[0]} wide")

def fails(ctx: ToolContext) -> ToolResult:
    """Fail."""
    raise RuntimeError("it broke")

def forgets(ctx: ToolContext) -> ToolResult:
    """Forget to return."""

def rotate(ctx: ToolContext) -> ToolResult:
    """Not the real one."""
    return ToolResult("mine")

def wordless(ctx: ToolContext) -> ToolResult:
    return ToolResult("mine")
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(USER_FILE)
    return path


def test_users_tools(user_file: Path) -> None:
    box = Toolbox(["rotate", f"{user_file}:measure", f"{user_file}:fails", f"{user_file}:forgets"])
    ctx = context()
    assert run("measure", {"box": [1, 2, 4.5, 3]}, ctx, box) == ToolResult("it: 3.5 wide")
    assert "'box' must have 4 items, not 3" in run("measure", {"box": [1, 2, 3]}, ctx, box).text
    broken = run("fails", {}, ctx, box)
    assert broken.error and "fails failed: RuntimeError: it broke" in broken.text
    forgotten = run("forgets", {}, ctx, box)
    assert forgotten.error and "returned NoneType" in forgotten.text


def test_bad_names_fail_at_start(user_file: Path) -> None:
    with pytest.raises(ValueError, match="unknown tool 'rotat'; did you mean 'rotate'"):
        Toolbox(["rotat"])
    with pytest.raises(
        ValueError, match=r"unknown tool 'zzz' \(known: rotate, flip, crop, zoom, draw_bbox, draw_line, look"
    ):
        Toolbox(["zzz"])
    with pytest.raises(ValueError, match="'rotate' is named twice"):
        Toolbox(["rotate", f"{user_file}:rotate"])
    with pytest.raises(ValueError, match=r"no file .*/nothing\.py"):
        Toolbox([f"{user_file.parent}/nothing.py:measure"])
    with pytest.raises(ValueError, match=r"my_tools\.py:missing: the file has no plain function"):
        Toolbox([f"{user_file}:missing"])
    with pytest.raises(ValueError, match="tool wordless: a docstring is needed"):
        Toolbox([f"{user_file}:wordless"])


def test_from_text_to_image() -> None:
    image = noise(4, 8)
    parsed = parse_tool_calls('<tool_call>\n{"name": "rotate", "arguments": {"angle": 180}}\n</tool_call>')
    result = Toolbox(["rotate"]).run(parsed.calls[0], context(image))
    assert np.array_equal(result.images[0].rgb, image.rgb[::-1, ::-1])
