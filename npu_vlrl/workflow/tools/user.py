"""A user's tool, seen from the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_vlrl.types import ToolResult
from npu_vlrl.workflow.tools.context import ToolContext
from npu_vlrl.workflow.tools.worker import pack
from npu_vlrl.workflow.workers import WorkerError, WorkerPool


class UserTool:
    """A function of the user's own file. The program itself never imports the file.

    Example: `UserTool("my_tools.py:mirror", workers=1, deadline_s=10.0).schema["function"]["name"] == "mirror"`
    """

    schema: dict[str, Any]

    def __init__(self, spec: str, workers: int, deadline_s: float, memory_mib: int = 0) -> None:
        """Starts a first process. Raises ValueError when file, function or signature cannot be used."""
        name = spec.rpartition(":")[2]
        service = "npu_vlrl.workflow.tools.worker"
        self._pool = WorkerPool(service, {"function": spec}, f"the tool {name!r}", workers, deadline_s, memory_mib)
        self.schema = self._pool.start()

    @property
    def wrong_replies(self) -> int:
        """See `WorkerPool.wrong_replies`."""
        return self._pool.wrong_replies

    def run(self, ctx: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
        """Blocks for at most the deadline, once a process is free; death, delay and failure are told as error results.

        Raises ValueError when no process can be started any more.
        """
        content, images = pack(ctx)
        try:
            reply, shown = self._pool.submit({**content, "arguments": dict(arguments)}, images).result()
        except WorkerError as error:
            return ToolResult(f"The call failed: {error}.", error=True)
        if "text" not in reply:  # what failed was around the function: its arguments, or what it gave back
            return ToolResult(f"The call failed: it {reply['error']}.", error=True)
        return ToolResult(reply["text"], shown, reply["error"])

    def close(self) -> None:
        self._pool.close()
