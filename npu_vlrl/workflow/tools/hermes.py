"""Tool calls as Qwen writes them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (the Hermes form)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from npu_vlrl.types import ToolCall
from npu_vlrl.workflow.texts import half_pair
from npu_vlrl.workflow.thought import split_thought

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = '<tool_call>{"name": "…", "arguments": {…}}</tool_call>'
MAX_CALLS = 32
"""Calls read from one text; a turn that repeats itself up to its token budget can hold thousands."""

MAX_DEPTH = 32
"""Limit for the nesting of arguments: Python can read a depth of a thousand, and not write it again."""

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ParsedCalls:
    """The tool calls of a text, in order, and the errors of those that cannot be read.

    Example: `parse_tool_calls("no call here") == ParsedCalls((), ())`
    """

    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    """Messages for the model. A text with an error may still hold good calls."""


def parse_tool_calls(text: str) -> ParsedCalls:
    """Reads every `<tool_call>` of `text` outside of its thoughts; what is broken or cut off becomes an error.

    `arguments` may also be a string that holds a JSON object. Reads at most `MAX_CALLS` calls, so that no text takes
    long.
    """
    return read_calls(text, _read_call, FORM)


def read_calls(text: str, read_call: Callable[[str, int], tuple[ToolCall, int]], form: str) -> ParsedCalls:
    """Reads the calls of any form between `OPEN` and `CLOSE`, outside of the text's thoughts and at most `MAX_CALLS`.

    `read_call` takes the text and where a call begins behind `OPEN`; it returns the call and where it ends, or raises
    ValueError with a reason for the model, which is told to write `form`.
    """
    calls: list[ToolCall] = []
    errors: list[str] = []
    outside = split_thought(text).blanked
    position = outside.find(OPEN)
    while position >= 0:
        if len(calls) + len(errors) == MAX_CALLS:
            errors.append(f"The tool calls after the first {MAX_CALLS} were not run: these are too many at once.")
            break
        position += len(OPEN)
        try:
            call, position = read_call(text, position)
            calls.append(call)
        except (ValueError, RecursionError) as error:
            reason = "its JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)
            errors.append(f"Tool call {len(calls) + len(errors) + 1} was not run: {reason}. Write it as {form}")
        position = outside.find(OPEN, position)
    return ParsedCalls(tuple(calls), tuple(errors))


def write_tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, separators=(",", ":"))
    return f"{OPEN}{written}{CLOSE}"


def read_json(text: str) -> Any:
    """A value without constants and numbers that JSON does not have. Raises ValueError."""
    return _DECODER.decode(text)


def check_depth(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that Python could not write again."""
    if _depth(arguments) > MAX_DEPTH:
        raise ValueError(f'its "arguments" are nested more than {MAX_DEPTH} deep')


def _read_call(text: str, position: int) -> tuple[ToolCall, int]:
    """The call whose JSON begins at `position`, and where it ends. Raises ValueError with a reason for the model.

    The JSON decides where a call ends, since a string inside it may hold the closing tag.
    """
    position = _skip_space(text, position)
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is broken or cut off ({error.msg}, character {error.pos - position + 1})") from None
    end = _skip_space(text, end)
    if not text.startswith(CLOSE, end):
        raise ValueError(f"its JSON is not followed by {CLOSE}")
    return _call(value), end + len(CLOSE)


def _call(value: Any) -> ToolCall:
    if not isinstance(value, Mapping):
        raise ValueError("its JSON is not an object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError('it has no "name"')
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            raise ValueError('its "arguments" are a string that is not JSON') from None
    if not isinstance(arguments, Mapping):
        raise ValueError('its "arguments" are not an object')
    check_depth(arguments)
    for text in (name, *_strings(arguments)):
        if problem := half_pair(text):
            raise ValueError(f"its JSON holds {problem}")
    return ToolCall(name, arguments)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _strings(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(inner)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
