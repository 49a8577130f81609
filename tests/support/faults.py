"""Checks of an acceptance test with something wrong in them. Workers call them by name."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from npu_vlrl.acceptance import collectives, ops, training
from npu_vlrl.acceptance.worker import Machine
from npu_vlrl.kernels import parity
from npu_vlrl.sync.transfer import Checksums


def good(machine: Machine) -> dict[str, Any]:
    return {"detail": f"process {os.getpid()}"}


def wrong_op(machine: Machine, op: str, dtype: str) -> dict[str, Any]:
    """An implementation that is off by five per cent."""
    right = parity.op
    parity.op = lambda name: lambda *inputs: right(name)(*inputs) * 1.05
    try:
        return ops.compare(machine, op, dtype)
    finally:
        parity.op = right


def hang(machine: Machine) -> dict[str, Any]:
    time.sleep(600)
    return {}


def crash(machine: Machine) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def talkative(machine: Machine) -> dict[str, Any]:
    raise RuntimeError(f"{socket.gethostname()} 10.1.2.3 {Path.home()}/model")


def absent_rank(machine: Machine, pattern: str, members: str) -> dict[str, Any]:
    """The last rank does not take part."""
    if machine.world.rank == machine.size - 1:
        time.sleep(600)
    return collectives.pattern(machine, pattern, members)


def wrong_sum(machine: Machine, pattern: str, members: str) -> dict[str, Any]:
    """The device adds one to what it reduces, on one rank."""
    real = dist.all_reduce

    def spoilt(values: Any, **options: Any) -> Any:
        work = real(values, **options)
        values += machine.rank
        return work

    dist.all_reduce = spoilt
    try:
        return collectives.pattern(machine, pattern, members)
    finally:
        dist.all_reduce = real


def damaged_bucket(machine: Machine) -> dict[str, Any]:
    """An engine that gets one byte wrong of what was sent."""
    real = Checksums.take

    def take(sums: Checksums, number: int, bucket: Any) -> None:
        if machine.rank:
            bucket[0] += 1
        real(sums, number, bucket)

    Checksums.take = take  # type: ignore[method-assign]
    return training.weights(machine)
