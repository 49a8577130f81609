"""The worker process: `python -m npu_vlrl.workflow.workers.serve FD SETUP`.

FD is its end of a socket. SETUP is JSON: service, options, deadline_s. It says `{"ready": hello}` or `{"error": …}`
once, then answers each request with one message, and ends when the socket closes. No torch here: a worker must be small
and start quickly.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from npu_vlrl.types import Image
from npu_vlrl.workflow.workers.wire import Content, receive, send

Handler = Callable[[Content, Sequence[Image]], tuple[Content, Sequence[Image]]]
"""Request and its images to answer and its images. What it raises becomes `{"error": …}`."""


def main() -> None:
    descriptor, setup = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what a user's function prints must not mix with the program's output
    serve(Connection(descriptor), setup)


def serve(connection: Connection, setup: Mapping[str, Any]) -> None:
    """Answers requests until the other end closes."""
    try:
        hello, handle = importlib.import_module(setup["service"]).open_service(setup["options"])
    except Exception as error:
        send(connection, {"error": str(error) if isinstance(error, ValueError) else _named(error)})
        return
    send(connection, {"ready": hello})
    while True:
        try:
            request, images = receive(connection)
        except EOFError:
            return
        # The pool kills a late worker. This ends it in the kernel if the pool itself was killed meanwhile.
        signal.alarm(math.ceil(setup["deadline_s"]) + 1)
        content, pictures = _answer(handle, request, images)
        signal.alarm(0)
        send(connection, content, pictures)


def _answer(handle: Handler, request: Content, images: Sequence[Image]) -> tuple[Content, Sequence[Image]]:
    try:
        return handle(request, images)
    except Exception as error:
        return {"error": f"raised {_named(error)}"}, ()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
