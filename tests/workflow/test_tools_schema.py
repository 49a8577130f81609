"""Schemas from signatures, and the validator."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.workflow.tools.context import ToolContext
from npu_vlrl.workflow.tools.schema import function_schema, validate


def draw(
    ctx: Any,
    box: tuple[float, float, float, float],
    points: list[tuple[int, int]],
    label: str,
    colour: Literal["red", "green"] = "red",
    *,
    factor: float = 1.0,
    level: Literal[1, 2] = 1,
    filled: bool = False,
) -> None:
    """Draw a box
    and points.

    More about it.

    Args:
        box: left, top,
            right, bottom
        label (str): what to write: a word
        ghost

    Returns:
        nothing: at all
    """


SCHEMA = function_schema(draw)["function"]
PARAMETERS = SCHEMA["parameters"]
GOOD: dict[str, Any] = {"box": [0, 1, 2.5, 3], "points": [[1, 2], [3, 4]], "label": "a"}


def test_schema_of_every_type() -> None:
    assert SCHEMA["name"] == "draw"
    assert SCHEMA["description"] == "Draw a box and points. More about it."
    assert PARAMETERS == {
        "type": "object",
        "required": ["box", "points", "label"],
        "properties": {
            "box": {
                "type": "array",
                "items": {"type": "number"},
                "minItems": 4,
                "maxItems": 4,
                "description": "left, top, right, bottom",
            },
            "points": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
            },
            "label": {"type": "string", "description": "what to write: a word ghost"},
            "colour": {"type": "string", "enum": ["red", "green"]},
            "factor": {"type": "number"},
            "level": {"type": "integer", "enum": [1, 2]},
            "filled": {"type": "boolean"},
        },
    }


def test_good_arguments() -> None:
    assert validate(GOOD, PARAMETERS) == []
    full = {**GOOD, "colour": "green", "factor": 2, "level": 2, "filled": True, "points": []}
    assert validate(full, PARAMETERS) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"box": 5}, "'box' must be a list, not 5"),
        ({"box": "0,1,2,3"}, "'box' must be a list, not '0,1,2,3'"),
        ({"box": [0, 1, 2]}, "'box' must have 4 items, not 3"),
        ({"box": [0, 1, "2", 3]}, "'box[2]' must be a number, not '2'"),
        ({"points": [[1, 2], [3, 4.5]]}, "'points[1][1]' must be an integer, not 4.5"),
        ({"points": [[1, 2], 3]}, "'points[1]' must be a list, not 3"),
        ({"label": 3}, "'label' must be a string, not 3"),
        ({"label": None}, "'label' must be a string, not None"),
        ({"colour": "blue"}, "'colour' must be one of 'red', 'green', not 'blue'"),
        ({"level": True}, "'level' must be an integer, not True"),
        ({"level": 3}, "'level' must be one of 1, 2, not 3"),
        ({"filled": 1}, "'filled' must be true or false, not 1"),
        ({"factor": True}, "'factor' must be a number, not True"),
        ({"factor": float("inf")}, "'factor' must be a number, not inf"),
        ({"factor": {"a": "x" * 99}}, "'factor' must be a number, not {'a': '" + "x" * 50 + "..."),
        ({"size": 1}, "'size' is not a parameter (there are: box, points, label, colour, factor, level, filled)"),
    ],
)
def test_bad_arguments(change: dict[str, Any], problem: str) -> None:
    assert validate({**GOOD, **change}, PARAMETERS) == [problem]


def test_every_problem_is_told() -> None:
    problems = validate({"label": 1, "size": 1}, PARAMETERS)
    assert problems[:3] == ["'box' is missing", "'points' is missing", "'label' must be a string, not 1"]
    assert len(problems) == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*PARAMETERS["properties"], "other"]), JSON))
@settings(max_examples=60, deadline=None)
def test_any_json_is_answered_and_only_right_types_pass(arguments: dict[str, Any]) -> None:
    if not validate(arguments, PARAMETERS):
        assert isinstance(arguments["label"], str) and len(arguments["box"]) == 4
        assert all(type(x) is int for point in arguments["points"] for x in point)


def optional(
    ctx: Any, a: int | None, b: Literal["x", "y"] | None = None, c: tuple[int, int] | None = None, d: float = 1.0
) -> None:
    """Doc."""


def test_optional_values_take_null_where_none_is_in_the_type() -> None:
    parameters = function_schema(optional)["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"] == {
        "a": {"type": ["integer", "null"]},
        "b": {"type": ["string", "null"], "enum": ["x", "y", None]},
        "c": {"type": ["array", "null"], "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "d": {"type": "number"},
    }
    for good in ({"a": None}, {"a": 1, "b": None, "c": None}, {"a": 1, "b": "x", "c": [1, 2], "d": 0.5}):
        assert validate(good, parameters) == []
    assert validate({"a": "1", "b": "z", "c": [1], "d": None}, parameters) == [
        "'a' must be an integer, not '1'",
        "'b' must be one of 'x', 'y', None, not 'z'",
        "'c' must have 2 items, not 1",
        "'d' must be a number, not None",
    ]
    assert validate({}, parameters) == ["'a' is missing"]


def test_the_first_parameter_is_the_episode_by_its_name_or_type() -> None:
    def multiply(a: int, b: int) -> int:
        """Multiply, as a tool of another library is written."""
        return a * b

    def nothing() -> None:
        """Take nothing."""

    def typed(episode: ToolContext, a: int) -> None:
        """Doc."""

    assert function_schema(typed)["function"]["parameters"]["required"] == ["a"]
    for function in (multiply, nothing):
        with pytest.raises(ValueError, match=rf"tool {function.__name__} takes \(.*its first parameter must be"):
            function_schema(function)


def test_signatures_without_a_schema() -> None:
    def wordless(ctx: Any) -> None: ...

    def untyped(ctx: Any, a) -> None:  # type: ignore[no-untyped-def]
        """Doc."""

    def mapping(ctx: Any, a: dict[str, int]) -> None:
        """Doc."""

    def mixed(ctx: Any, a: tuple[int, str]) -> None:
        """Doc."""

    def literals(ctx: Any, a: Literal["x", 1]) -> None:
        """Doc."""

    def many(ctx: Any, *a: int) -> None:
        """Doc."""

    def either(ctx: Any, a: int | str | None) -> None:
        """Doc."""

    def unknown(ctx: Any, a: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Doc."""

    with pytest.raises(ValueError, match="tool wordless: a docstring is needed"):
        function_schema(wordless)
    with pytest.raises(ValueError, match="tool untyped, parameter a: it needs a type"):
        function_schema(untyped)
    for function in (mapping, mixed, literals, either):
        with pytest.raises(ValueError, match=f"tool {function.__name__}, parameter a: the type .* has no schema"):
            function_schema(function)
    with pytest.raises(ValueError, match="parameter a: it must be a plain named parameter"):
        function_schema(many)
    with pytest.raises(ValueError, match="tool unknown: name 'NoSuchType' is not defined"):
        function_schema(unknown)
