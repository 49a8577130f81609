"""The worker process: `python -m npu_vlrl.workflow.workers.serve FD SETUP`.

FD is the worker's end of a socket. SETUP is JSON: service, options, name, memory_mib. Supervised by its parent
(`supervise.py`) it sends `{"ready": hello}` or `{"error": …}` once, then answers each request with one message, and
ends when the socket closes. It imports no torch: a worker must be small and start quickly.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from npu_vlrl.types import Image
from npu_vlrl.workflow.texts import described, told
from npu_vlrl.workflow.workers.supervise import supervise
from npu_vlrl.workflow.workers.wire import Content, receive, send

Handler = Callable[[Content, Sequence[Image]], tuple[Content, Sequence[Image]]]
"""Handler of a service: maps request and images to reply and images. An exception becomes `{"error": …}`."""


def main() -> None:
    descriptor, setup = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(descriptor, False)
    supervise(setup["name"], setup["memory_mib"], descriptor)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel ends this process before the training
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    _keep_from_children(descriptor)
    serve(Connection(descriptor), setup)


def serve(connection: Connection, setup: Mapping[str, Any]) -> None:
    """Answers requests until the other end closes the connection."""
    pid = os.getpid()
    try:
        hello, handle = importlib.import_module(setup["service"]).open_service(setup["options"])
        reply = {"ready": hello}
    except Exception as error:
        reply = {"error": told(str(error)) if isinstance(error, ValueError) else described(error)}
    _end_forked(pid)
    send(connection, reply)
    while "ready" in reply:
        try:
            request, images, number, _ = receive(connection)
        except EOFError:
            return
        content, shown = _answer(handle, request, images)
        _end_forked(pid)
        send(connection, content, shown, number)


def _answer(handle: Handler, request: Content, images: Sequence[Image]) -> tuple[Content, Sequence[Image]]:
    try:
        return handle(request, images)
    except Exception as error:
        return {"error": f"raised {described(error)}"}, ()


def _end_forked(pid: int) -> None:
    """Ends a process that the function forked and that returned as if it were the worker."""
    if os.getpid() != pid:
        os._exit(0)


def _keep_from_children(descriptor: int) -> None:
    """Redirects `descriptor` to the null device in forked children: the socket is the worker's alone."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, descriptor, inheritable=False))


if __name__ == "__main__":
    main()
