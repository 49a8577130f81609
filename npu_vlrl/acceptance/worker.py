"""Worker process of a `crew`, started as `python -m npu_vlrl.acceptance.worker DESCRIPTOR`.

It runs the checks that it reads from standard input, and writes a line of JSON for each into the pipe DESCRIPTOR.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from npu_vlrl import kernels
from npu_vlrl.hardware import Platform, to_report
from npu_vlrl.network.world import World, join

LARGE = 20e9
"""Bytes of a device's memory from which checks have their full sizes."""


class NotTried(Exception):
    """Raised by a check that does not apply here; the message says why."""


class Failed(Exception):
    """Raised by a check that found a fault. `found` goes into the report beside the message."""

    def __init__(self, message: str, **found: Any) -> None:
        super().__init__(message)
        self.found = found


class Machine:
    """Argument of the checks: this process's device, and the other processes of its crew."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.deadline_s = 60.0
        self._groups: dict[str, dist.ProcessGroup | None] = {}

    @cached_property
    def platform(self) -> Platform:
        """Opens the platform on this process's device. Raises HardwareError."""
        platform = to_report()
        platform.set_device(self.rank if platform.device_count() > 1 else 0)
        kernels.use(platform.kernels)
        return platform

    @property
    def device(self) -> torch.device:
        platform = self.platform
        return platform.device(self.rank if platform.device_count() > 1 else 0)

    @cached_property
    def reduced(self) -> bool:
        """Whether sizes are reduced: on a CPU, and on devices of less than `LARGE` bytes, such as stand-ins."""
        memory = self.platform.memory(self.device.index or 0)
        return memory is None or memory.total < LARGE

    @cached_property
    def world(self) -> World:
        """Connection with the processes of the crew, as in a training."""
        return join(self.platform, self.deadline_s, device=self.device.index)

    def group(self, members: str) -> tuple[list[int], dist.ProcessGroup | None]:
        """Ranks of a group that a training makes, and the group itself where this process is a member. Every process
        must call it.
        """
        half = max(2, self.world.size // 2)
        ranks = {"all": range(self.size), "some": range(half), "engines": [0, *range(half, self.size)]}[members]
        if members not in self._groups:
            group = dist.new_group(list(ranks), backend=self.platform.process_group_backend)
            self._groups[members] = group if self.rank in ranks else None
        return list(ranks), self._groups[members]


def main(descriptor: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    machine = Machine()
    with os.fdopen(descriptor, "w") as results:
        for line in sys.stdin:
            request = json.loads(line)
            machine.deadline_s = request["deadline_s"]
            results.write(json.dumps(_entry(machine, request)) + "\n")
            results.flush()
            sys.stdout.flush()
    os._exit(0)  # a collective that failed would hold up a normal end


def _entry(machine: Machine, request: dict[str, Any]) -> dict[str, Any]:
    module, _, function = request["function"].partition(":")
    try:
        check = getattr(importlib.import_module(module), function)
        return {"status": "ok", **check(machine, **request["arguments"])}
    except NotTried as reason:
        return {"status": "not tried", "detail": str(reason)}
    except Failed as error:
        return {"status": "failed", "detail": str(error), **error.found}
    except Exception as error:  # whatever a driver or a library raises is what the report is for
        said = str(error).strip() or "no message"
        lines = traceback.format_exc().strip().splitlines()[-15:]
        return {"status": "failed", "detail": f"{type(error).__name__}: {said}", "log": lines}


if __name__ == "__main__":
    # checks import this module by its name, and must find the same classes
    importlib.import_module("npu_vlrl.acceptance.worker").main(int(sys.argv[1]))
