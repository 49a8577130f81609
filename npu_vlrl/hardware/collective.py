"""Check of a collective: two processes on this machine all-reduce numbers through the backend of a training."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from npu_vlrl.hardware.base import HardwareError, Platform

SIZE = 2
POLL_S = 0.05


class CollectiveError(RuntimeError):
    """The processes did not get the right sum in time; the message names the process and its error."""


def keep_gloo_on_this_machine() -> None:
    """Binds gloo to the loopback interface, so that other machines cannot connect. Called before processes of one
    machine join; an interface that the user has set stays.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def backend(platform: Platform) -> str:
    """The backend of a training where each process can have a device, else gloo on the host."""
    return platform.process_group_backend if platform.device_count() >= SIZE else "gloo"


def check(platform: Platform, timeout_s: float) -> None:
    """Starts the processes, and waits until all have ended or one has failed.

    Raises CollectiveError after `timeout_s` seconds at the latest.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        # stderr goes into files: a full pipe would block a process that writes much
        logs = [Path(folder) / f"rank{rank}" for rank in range(SIZE)]
        processes = [_start(platform, rank, Path(folder) / "store", timeout_s, log) for rank, log in enumerate(logs)]
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        _judge(codes, logs, timeout_s)


def _start(platform: Platform, rank: int, store: Path, timeout_s: float, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "npu_vlrl.hardware", "collective", str(rank), str(store), str(timeout_s)],
            env={**os.environ, "NPU_VLRL_PLATFORM": platform.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def _judge(codes: list[int | None], logs: list[Path], timeout_s: float) -> None:
    """Raises CollectiveError. A process that failed is named before one that waits for it."""
    for rank, code in enumerate(codes):
        if code not in (0, None):
            said = logs[rank].read_text(errors="replace").strip().splitlines()
            raise CollectiveError(
                f"process {rank} of {SIZE} ended with code {code}: {said[-1] if said else 'no message'}"
            )
    waiting = [str(rank) for rank, code in enumerate(codes) if code is None]
    if waiting:
        raise CollectiveError(f"process {' and '.join(waiting)} of {SIZE} did not end within {timeout_s:g} s")


def peer(platform: Platform, rank: int, store: str, timeout_s: float) -> None:
    """Runs one of the processes. Raises HardwareError for a wrong sum."""
    name = backend(platform)
    devices = [torch.device("cpu")]
    if name != "gloo":
        platform.set_device(rank)
        devices.append(platform.device(rank))
    keep_gloo_on_this_machine()
    dist.init_process_group(
        name, init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=timeout_s)
    )
    try:
        for device in devices:
            values = torch.arange(1, 5, dtype=torch.float32, device=device) * (rank + 1)
            dist.all_reduce(values)
            if values.tolist() != [3, 6, 9, 12]:
                found = values.tolist()
                raise HardwareError(f"a sum over {SIZE} processes on {device} is {found} and not [3, 6, 9, 12]")
    finally:
        dist.destroy_process_group()  # its threads would crash the end of a process that fails, and hide why
