"""Tools that the model may call, by name.

A tool is one function `(ctx: ToolContext, **typed arguments) -> ToolResult` with a docstring, in a file of its own. Its
schema is derived from its signature. It raises ToolError for what the model asked wrongly.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from npu_vlrl.types import ToolCall, ToolResult
from npu_vlrl.workflow.rewards.userfile import is_spec, load_function
from npu_vlrl.workflow.tools.context import ToolContext, ToolError
from npu_vlrl.workflow.tools.hermes import ParsedCalls, parse_tool_calls
from npu_vlrl.workflow.tools.look import look
from npu_vlrl.workflow.tools.rotate import rotate
from npu_vlrl.workflow.tools.schema import function_schema, validate

__all__ = ["TOOLS", "ParsedCalls", "ToolContext", "ToolError", "Toolbox", "parse_tool_calls"]

ToolFunction = Callable[..., ToolResult]

TOOLS: dict[str, ToolFunction] = {"rotate": rotate, "look": look}


@dataclass(frozen=True)
class _Tool:
    function: ToolFunction
    schema: dict[str, Any]

    @property
    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.schema["function"]["parameters"]
        return parameters


class Toolbox:
    """The tools of a run.

    Example: `Toolbox(["rotate"]).run(ToolCall("rotate", {"angle": 90}), ToolContext(task, task.images)).images[0]`
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: keys of `TOOLS`, or `path/to/file.py:function` for the user's own.

        Raises ValueError for an unknown or repeated name, a missing file or function, or a signature without schema.
        """
        self._tools: dict[str, _Tool] = {}
        for name in names:
            function = _find(name)
            if function.__name__ in self._tools:
                raise ValueError(f"the tool {function.__name__!r} is named twice; a name can mean one tool only")
            self._tools[function.__name__] = _Tool(function, function_schema(function))

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas, for the chat template."""
        return [copy.deepcopy(tool.schema) for tool in self._tools.values()]

    def run(self, call: ToolCall, ctx: ToolContext) -> ToolResult:
        """Runs a call that a model wrote. Never raises: what goes wrong is told to the model as an error result."""
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"There is no tool {call.name[:80]!r}. Available: {self._describe()}.", error=True)
        problems = validate(call.arguments, tool.parameters)
        if problems:
            return ToolResult(f"{call.name}: {'; '.join(problems)}.", error=True)
        try:
            result = tool.function(ctx, **_tuples(tool.function, call.arguments))
        except ToolError as error:
            return ToolResult(f"{call.name}: {error}.", error=True)
        except Exception as error:  # a user's tool met arguments that it did not expect
            return ToolResult(f"{call.name} failed: {type(error).__name__}: {error}.", error=True)
        if not isinstance(result, ToolResult):
            return ToolResult(f"{call.name} failed: it returned {type(result).__name__}, no result.", error=True)
        return result

    def _describe(self) -> str:
        signatures = [f"{name}({', '.join(tool.parameters['properties'])})" for name, tool in self._tools.items()]
        return ", ".join(signatures) or "none"


def _find(name: str) -> ToolFunction:
    if is_spec(name):
        return load_function(name)
    if name not in TOOLS:
        nearest = difflib.get_close_matches(name, TOOLS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"unknown tool {name!r}{hint} (known: {', '.join(TOOLS)}; your own: path/to/file.py:function)")
    return TOOLS[name]


def _tuples(function: ToolFunction, arguments: Any) -> dict[str, Any]:
    """JSON has lists only; a parameter typed as a tuple gets one."""
    hints = get_type_hints(function)
    return {key: tuple(value) if get_origin(hints[key]) is tuple else value for key, value in arguments.items()}
