"""Runs a Python text in processes of their own on the stand-in, as the ranks of one job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from tests.host_cann import environment
from tests.support.ranks import PATIENCE_S


@dataclass(frozen=True)
class Ended:
    """How a child process ended."""

    code: int
    output: str
    """stdout and stderr."""


def run(text: str, ranks: int = 1, timeout_s: float = PATIENCE_S, **variables: str) -> list[Ended]:
    """Runs `text` as each rank, with torchrun's variables set, and returns how the ranks ended, in order.

    Raises AssertionError after `timeout_s`, with what each said and where its threads were; all have ended then.
    """
    shared = {**os.environ, **environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **variables}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [child.communicate(timeout=timeout_s)[0] for child in children]
    except subprocess.TimeoutExpired:
        for child in children:
            child.send_signal(signal.SIGABRT)  # the fault handler writes the stack of every thread
        said = [_rest(child) for child in children]
        raise AssertionError("\n".join([f"not ended after {timeout_s:g} s", *said])) from None
    finally:
        for child in children:
            child.kill()
    return [Ended(child.returncode, output) for child, output in zip(children, outputs, strict=True)]


def _rest(child: subprocess.Popen[str]) -> str:
    """Output of a child that was told to abort; a grandchild that holds it open must not hold up the test."""
    try:
        return child.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired as held:
        return (held.stdout or b"").decode(errors="replace")  # bytes here, whatever Popen was told


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
