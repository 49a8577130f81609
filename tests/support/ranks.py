"""Real processes with ranks, started as torchrun starts them, but each left to its own fate."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(
    size: int, arguments: Sequence[object], folder: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """`python ARGUMENTS` once for each rank. What a process says is in `folder/rank<n>.log`."""
    port = free_port()
    processes = []
    for rank in range(size):
        settings = {
            "OMP_NUM_THREADS": "1",
            "NPU_VLRL_PLATFORM": "cpu",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            **(environment or {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with log(folder, rank).open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    cwd=ROOT,
                    env={**os.environ, **settings},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def finish(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float = 60) -> list[int]:
    """The exit code of each; all are killed when one is not done in time."""
    try:
        return [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def said(folder: Path, size: int) -> str:
    """What all processes said, for the message of a failed test."""
    return "\n".join(f"--- rank {rank}\n{log(folder, rank).read_text()}" for rank in range(size))
