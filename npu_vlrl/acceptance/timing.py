"""Times work on a device: the median of several calls, each synchronised."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from npu_vlrl.acceptance.worker import Machine


def milliseconds(machine: Machine, work: Callable[[], object]) -> float:
    """Median milliseconds of 20 calls after 3 warm-up calls; of 3 after 1 where sizes are reduced."""
    before, calls = (1, 3) if machine.reduced else (3, 20)
    taken = []
    for number in range(before + calls):
        machine.platform.synchronize()
        began = time.perf_counter()
        work()
        machine.platform.synchronize()
        if number >= before:
            taken.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(taken), 4)
