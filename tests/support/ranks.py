"""Real processes with ranks, started as torchrun starts them, but each left to its own fate."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol

import torch.multiprocessing

ROOT = Path(__file__).parents[2]
PATIENCE_S = 280
"""How long a test waits for what takes seconds on an idle machine; pytest gives every test 300 s."""

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "NPU_VLRL_PLATFORM": "cpu",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Process(Protocol):
    """What `subprocess.Popen` and `Forked` have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(
    size: int, arguments: Sequence[object], folder: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """`python ARGUMENTS` once for each rank. What a process says is in `folder/rank<n>.log`."""
    processes = []
    for rank, place in enumerate(_places(size)):
        with log(folder, rank).open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    cwd=ROOT,
                    env={**os.environ, **SETTINGS, **(environment or {}), **place},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def fork(size: int, arguments: Sequence[object], folder: Path) -> list[Forked]:
    """As `start`, without the seconds in which each rank imports torch and transformers: the ranks are forked from a
    process that has done so. `arguments` begin with `-m MODULE`.
    """
    option, module, *words = map(str, arguments)
    assert option == "-m"
    return [Forked(module, words, place, log(folder, rank)) for rank, place in enumerate(_places(size))]


class Forked:
    """A process that runs a module as `python -m` does."""

    def __init__(self, module: str, words: Sequence[str], place: Mapping[str, str], output: Path) -> None:
        variables = {**os.environ, **SETTINGS, **place}
        self._process = _server().Process(target=_run, args=(module, list(words), variables, str(output)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self._process.kill()


def fork_here(function: Callable[[int, str], None], size: int, folder: Path) -> None:
    """Calls `function(rank, folder)` in a fork of this process for each rank, and waits for all.

    Forked, not spawned: nothing is imported again, and no thread of autograd runs yet on a CPU.
    """
    context = torch.multiprocessing.start_processes(
        function, (str(folder),), nprocs=size, join=False, daemon=True, start_method="fork"
    )
    said = "the ranks wait for each other"
    assert context is not None and any(context.join(timeout=1) for _ in range(PATIENCE_S)), said


@cache
def _server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.support.imported"])
    return context


def _run(module: str, words: list[str], variables: dict[str, str], output: str) -> None:
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv[1:] = words
    import npu_vlrl.hardware  # noqa: F401  (hides a torch_npu without CANN, before the module imports transformers)

    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _places(size: int) -> list[dict[str, str]]:
    """The variables of each rank, on one port."""
    port = free_port()
    every = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in {**every, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(size)
    ]


def log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def finish(processes: Sequence[Process], timeout_s: float = PATIENCE_S) -> list[int]:
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
