"""Forms of tool calls, by the names that model families use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_vlrl.workflow.tools.glm import parse_glm_calls, write_glm_call
from npu_vlrl.workflow.tools.hermes import ParsedCalls, parse_tool_calls, write_tool_call


@dataclass(frozen=True)
class ToolForm:
    """Reads the calls of a text, and writes one."""

    parse: Callable[[str], ParsedCalls]
    write: Callable[[str, Mapping[str, Any]], str]


HERMES = ToolForm(parse_tool_calls, write_tool_call)
FORMS = {"hermes": HERMES, "glm": ToolForm(parse_glm_calls, write_glm_call)}
