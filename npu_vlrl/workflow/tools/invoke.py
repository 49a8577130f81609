"""Runs a tool's function on arguments that have passed its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from npu_vlrl.data.images import check_size
from npu_vlrl.types import DataError, Image, ToolResult
from npu_vlrl.workflow.texts import described, flaw, told
from npu_vlrl.workflow.tools.context import ToolContext, ToolError

Tool = Callable[..., ToolResult]
"""A function `(ctx: ToolContext, **typed arguments) -> ToolResult` with a docstring, both for the model."""


def invoke(name: str, function: Tool, ctx: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
    """Never raises: what goes wrong becomes an error result for the model."""
    hints = get_type_hints(function)
    typed = {key: _typed(value, hints[key]) for key, value in arguments.items()}
    try:
        result = function(ctx, **typed)
    except ToolError as error:
        return ToolResult(f"{name}: {told(str(error))}.", error=True)
    except (Exception, SystemExit) as error:  # a user's tool met arguments that it did not expect
        return ToolResult(f"{name} failed: {described(error)}.", error=True)
    if not isinstance(result, ToolResult):
        return ToolResult(f"{name} failed: it returned {type(result).__name__}, no ToolResult.", error=True)
    images = (result.images,) if isinstance(result.images, Image) else result.images
    known = isinstance(images, (tuple, list)) and all(isinstance(image, Image) for image in images)
    if not isinstance(result.text, str) or not known:
        return ToolResult(f"{name} failed: its ToolResult holds something else than text and images.", error=True)
    if problem := flaw(result.text):
        return ToolResult(f"{name} failed: its text holds {problem}.", error=True)
    try:
        for image in images:
            check_size(*image.size, name)
    except DataError as error:
        return ToolResult(f"{error}.", error=True)
    return ToolResult(result.text, tuple(images), bool(result.error))


def _typed(value: Any, hint: Any) -> Any:
    """JSON has lists only; where a parameter is typed as a tuple, also inside a list, it gets one."""
    if get_origin(hint) in (Union, UnionType):
        return (
            value if value is None else _typed(value, next(kind for kind in get_args(hint) if kind is not type(None)))
        )
    if get_origin(hint) not in (list, tuple):
        return value
    items = [_typed(item, get_args(hint)[0]) for item in value]
    return items if get_origin(hint) is list else tuple(items)
