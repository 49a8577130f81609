"""The worker process of a judge pool: `python -m npu_vlrl.workflow.rewards.worker FD SETUP`.

FD is its end of a socket that carries frames of bytes, each with its length. SETUP is JSON: rule, options, deadline_s.
It says `{"ready": true}` or `{"error": …}` once, then answers each request, a JSON frame followed by one frame of
RGB pixels for each size in its "images", with one frame: `{"verdict": …}`, `{"data_error": …}` or `{"error": …}`.
It ends when the socket closes. No torch here: a worker must be small and start quickly.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from npu_vlrl.types import DataError, JudgeError, Verdict
from npu_vlrl.workflow.rewards import RULES
from npu_vlrl.workflow.rewards.userfile import load_function

Request = dict[str, Any]
Handler = Callable[[Request], Verdict | None]


def main() -> None:
    descriptor, setup = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what a user's function prints must not mix with the program's output
    serve(Connection(descriptor), setup)


def serve(connection: Connection, setup: Mapping[str, Any]) -> None:
    """Answers requests until the other end closes."""
    try:
        handle = _handler(setup["rule"], setup["options"])
    except Exception as error:
        _send(connection, {"error": f"{error}"})
        return
    _send(connection, {"ready": True})
    while True:
        try:
            request = _receive(connection)
        except EOFError:
            return
        # The pool kills a late worker. This ends it in the kernel if the pool itself was killed meanwhile.
        signal.alarm(math.ceil(setup["deadline_s"]) + 1)
        reply = _reply(handle, request)
        signal.alarm(0)
        _send(connection, reply)


def _handler(rule: str, options: Mapping[str, Any]) -> Handler:
    module = importlib.import_module(RULES[rule])
    if rule == "python":
        name = options["function"]
        function = load_function(name)
        return lambda request: module.score(
            function, name, request["task"], request["text"], request["history"], _pictures(request)
        )
    return lambda request: (
        module.score(request["answer"], request["text"], **options)
        if "text" in request
        else module.check_gold(request["answer"], **options)
    )


def _reply(handle: Handler, request: Request) -> dict[str, Any]:
    try:
        verdict = handle(request)
    except DataError as error:
        return {"data_error": str(error)}
    except JudgeError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"raised {type(error).__name__}: {error}"}
    return {"verdict": None if verdict is None else dataclasses.asdict(verdict)}


def _pictures(request: Request) -> list[Any]:
    from PIL import Image  # only user functions look at pictures

    sizes = map(tuple, request["images"])
    return [Image.frombytes("RGB", size, pixels) for size, pixels in zip(sizes, request["pixels"], strict=True)]


def _receive(connection: Connection) -> Request:
    request: Request = json.loads(connection.recv_bytes())
    request["pixels"] = [connection.recv_bytes() for _ in request.get("images", ())]
    return request


def _send(connection: Connection, reply: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(reply, allow_nan=False).encode())


if __name__ == "__main__":
    main()
