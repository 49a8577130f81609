"""`python -m tests.integration.faulty FAULT WORDS…`: the program of `npu-vlrl WORDS…`, with a fault in its ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from npu_vlrl.cli import main
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.learner.ranks import Ranks

LAST = int(os.environ["WORLD_SIZE"]) - 1


def killed(call: int) -> None:
    if call == 5:  # two supervised steps, and the third update: the others wait for this rank
        os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory(call: int) -> None:
    if call == 5:
        raise MemoryError("no room for the gradients")


def hangs(call: int) -> None:
    if call == 5:
        time.sleep(1000)


def in_last_rank(fault: Callable[[int], None]) -> Any:
    calls = 0
    original = Ranks.sum_gradients

    def sum_gradients(ranks: Ranks, optimizer: torch.optim.Optimizer) -> None:
        nonlocal calls
        calls += 1
        if ranks.rank == LAST:
            fault(calls)
        original(ranks, optimizer)

    return sum_gradients


def not_summed(*_: Any) -> None:
    """Each rank steps with the gradients of its own share."""


def damaged(change: Any) -> Any:
    """The last rank's engine loses a tensor of its tower with the second update."""

    def weights_changed(engine: InProcessEngine, version: int) -> Any:
        if version == 2 and int(os.environ["RANK"]) == LAST:
            with torch.no_grad():
                next(engine.policy.vision.parameters()).normal_()
        return change(engine, version)

    return weights_changed


FAULTS: dict[str, list[tuple[type, str, Any]]] = {
    "killed": [(Ranks, "sum_gradients", in_last_rank(killed))],
    "out of memory": [(Ranks, "sum_gradients", in_last_rank(out_of_memory))],
    "hangs": [(Ranks, "sum_gradients", in_last_rank(hangs))],
    "damaged": [(InProcessEngine, "weights_changed", damaged(InProcessEngine.weights_changed))],
    "not summed": [(Ranks, "sum_gradients", not_summed)],
    "not summed, not compared": [(Ranks, "sum_gradients", not_summed), (LearnerGroup, "_compare", lambda *_: None)],
}

if __name__ == "__main__":
    for owner, name, fault in FAULTS[sys.argv[1]]:
        mock.patch.object(owner, name, fault).start()
    sys.exit(main(sys.argv[2:]))
