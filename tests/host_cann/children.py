"""Runs a Python text in processes of their own on the stand-in, as the ranks of one job."""

from __future__ import annotations

import os
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

    Raises subprocess.TimeoutExpired, after it has ended them all.
    """
    shared = {**os.environ, **environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **variables}
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
    finally:
        for child in children:
            child.kill()
    return [Ended(child.returncode, output) for child, output in zip(children, outputs, strict=True)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
