"""Tool calls as GLM-4.5 and its successors write them (their published chat templates).

    <tool_call>crop
    <arg_key>box</arg_key>
    <arg_value>[0, 0, 10, 10]</arg_value>
    </tool_call>

A value is JSON, or a text without quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from npu_vlrl.types import ToolCall
from npu_vlrl.workflow.texts import half_pair
from npu_vlrl.workflow.tools.hermes import CLOSE, OPEN, ParsedCalls, check_depth, read_calls, read_json

FORM = f"{OPEN}NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n{CLOSE}"

_NAME = re.compile(r"\s*([^\s<]+)\s*")
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def parse_glm_calls(text: str) -> ParsedCalls:
    """Reads every `<tool_call>` of `text` outside of its thoughts; what is broken or cut off becomes an error. See
    `read_calls`.
    """
    return read_calls(text, _read_call, FORM)


def write_glm_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of a call."""
    lines = []
    for key, value in arguments.items():
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n")
    return f"{OPEN}{name}\n{''.join(lines)}{CLOSE}"


def _read_call(text: str, position: int) -> tuple[ToolCall, int]:
    """The call that begins at `position`, and where it ends. Raises ValueError with a reason for the model."""
    found = _NAME.match(text, position)
    if found is None:
        raise ValueError("it has no name")
    name, position = found[1], found.end()
    arguments: dict[str, Any] = {}
    while argument := _ARGUMENT.match(text, position):
        key, value = argument[1].strip(), _value(argument[2])
        if key in arguments:
            raise ValueError(f"it has the argument {key[:80]!r} twice")
        arguments[key], position = value, argument.end()
    if not text.startswith(CLOSE, position):
        raise ValueError(f"its arguments are broken or cut off: {CLOSE} is expected behind the last one")
    check_depth(arguments)
    if problem := half_pair(name + json.dumps(arguments, ensure_ascii=False)):
        raise ValueError(f"it holds {problem}")
    return ToolCall(name, arguments), position + len(CLOSE)


def _value(written: str) -> Any:
    try:
        return read_json(written)
    except ValueError:
        return written
