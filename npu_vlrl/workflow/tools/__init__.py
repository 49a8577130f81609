"""Tools that the model may call, by name.

A tool is one function `(ctx: ToolContext, **typed arguments) -> ToolResult` with a docstring, in a file of its own. Its
schema is derived from its signature. It raises ToolError for what the model asked wrongly. The tools of this package
take bounded time and run in place; users' own run in worker processes with a deadline.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from npu_vlrl.types import ToolCall, ToolResult
from npu_vlrl.workflow.tools.context import ToolContext, ToolError
from npu_vlrl.workflow.tools.crop import crop
from npu_vlrl.workflow.tools.draw_bbox import draw_bbox
from npu_vlrl.workflow.tools.draw_line import draw_line
from npu_vlrl.workflow.tools.flip import flip
from npu_vlrl.workflow.tools.frame import Frame
from npu_vlrl.workflow.tools.grey import grey
from npu_vlrl.workflow.tools.hermes import ParsedCalls, parse_tool_calls
from npu_vlrl.workflow.tools.invoke import Tool, invoke
from npu_vlrl.workflow.tools.look import look
from npu_vlrl.workflow.tools.rotate import rotate
from npu_vlrl.workflow.tools.schema import function_schema, on_scale, validate
from npu_vlrl.workflow.tools.user import UserTool
from npu_vlrl.workflow.tools.zoom import zoom
from npu_vlrl.workflow.workers import check_limits, is_spec

__all__ = [
    "TOOLS",
    "Frame",
    "ParsedCalls",
    "Tool",
    "ToolContext",
    "ToolError",
    "Toolbox",
    "on_scale",
    "parse_tool_calls",
]

TOOLS: dict[str, Tool] = {
    "rotate": rotate,
    "flip": flip,
    "grey": grey,
    "crop": crop,
    "zoom": zoom,
    "draw_bbox": draw_bbox,
    "draw_line": draw_line,
    "look": look,
}


class _Tool(Protocol):
    schema: dict[str, Any]

    @property
    def wrong_replies(self) -> int: ...

    def run(self, ctx: ToolContext, arguments: Mapping[str, Any]) -> ToolResult: ...

    def close(self) -> None: ...


class _BuiltIn:
    wrong_replies = 0
    """It asks no other process."""

    def __init__(self, function: Tool) -> None:
        self._function = function
        self.schema = function_schema(function)

    def run(self, ctx: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
        return invoke(self._function.__name__, self._function, ctx, arguments)

    def close(self) -> None:
        """Nothing to release."""


class Toolbox:
    """The tools of a run.

    Example: `Toolbox(["rotate"]).run(ToolCall("rotate", {"angle": 90}), ToolContext(task, task.images)).images[0]`
    """

    def __init__(self, names: Sequence[str], workers: int = 1, deadline_s: float = 10.0, memory_mib: int = 0) -> None:
        """`names`: keys of `TOOLS`, or `path/to/file.py:function` for the user's own.

        A user's tool gets up to `workers` processes, each with `memory_mib` of resident memory (0: any), and
        `deadline_s` seconds a call. Raises ValueError for an unknown
        or repeated name, a missing file or function, a signature without schema, or a bad number.
        """
        check_limits("tool", workers, deadline_s)
        self._tools: dict[str, _Tool] = {}
        try:
            for name in names:
                self._add(UserTool(name, workers, deadline_s, memory_mib) if is_spec(name) else _BuiltIn(_find(name)))
        except ValueError:
            self.close()
            raise

    @property
    def wrong_replies(self) -> int:
        """See `WorkerPool.wrong_replies`."""
        return sum(tool.wrong_replies for tool in self._tools.values())

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas, for the chat template."""
        return [copy.deepcopy(tool.schema) for tool in self._tools.values()]

    def run(self, call: ToolCall, ctx: ToolContext) -> ToolResult:
        """Runs a call that a model wrote; usable from any thread. What goes wrong is told to the model as an error.

        Blocks. Raises ValueError only when the process of a user's tool cannot be started any more.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"There is no tool {call.name[:80]!r}. Available: {self._describe()}.", error=True)
        problems = validate(call.arguments, _parameters(tool))
        if problems:
            return ToolResult(f"{call.name}: {'; '.join(problems)}.", error=True)
        return tool.run(ctx, call.arguments)

    def close(self) -> None:
        """Ends the processes of users' tools."""
        for tool in self._tools.values():
            tool.close()

    def _add(self, tool: _Tool) -> None:
        name = tool.schema["function"]["name"]
        if name in self._tools:
            tool.close()
            raise ValueError(f"the tool {name!r} is named twice; a name can mean one tool only")
        self._tools[name] = tool

    def _describe(self) -> str:
        signatures = [f"{name}({', '.join(_parameters(tool)['properties'])})" for name, tool in self._tools.items()]
        return ", ".join(signatures) or "none"


def _parameters(tool: _Tool) -> dict[str, Any]:
    parameters: dict[str, Any] = tool.schema["function"]["parameters"]
    return parameters


def _find(name: str) -> Tool:
    if name not in TOOLS:
        nearest = difflib.get_close_matches(name, TOOLS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"unknown tool {name!r}{hint} (known: {', '.join(TOOLS)}; your own: path/to/file.py:function)")
    return TOOLS[name]
