"""What moves the bytes of an update: a collective that can be given up, and checksums made where the bytes are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from npu_vlrl.sync.plan import ROW_BYTES
from npu_vlrl.sync.world import World

T = TypeVar("T")

POLL_S = 0.02
GRACE_S = 1.0
"""After a collective failed: how long to look for the peer whose end is the reason."""


class TransferTimeout(Exception):
    """The collective took longer than it may."""


def guarded(collective: Callable[[], T], world: World, look: Callable[[], None], limit_s: float) -> T:
    """Runs a collective, and gives it up when `look`, which is called again and again, raises what ended it.

    A collective of a device waits for a dead process until a timeout of its own, if ever, and cannot be interrupted.
    It therefore runs in a thread, which is left behind in that case; `world.abandoned` tells.
    Raises TransferTimeout after `limit_s` seconds. When the collective itself raises, `look` has the first word for a
    second: the end of a process says more than the error that it causes here.
    """
    result: list[T] = []
    failure: list[Exception] = []
    done = threading.Event()

    def work() -> None:
        try:
            world.enter_thread()
            result.append(collective())
        except Exception as error:
            failure.append(error)
        finally:
            done.set()

    world.abandoned = True  # until all is well
    threading.Thread(target=work, daemon=True, name="weights").start()
    deadline = time.monotonic() + limit_s
    while not done.wait(POLL_S):
        look()
        if time.monotonic() > deadline:
            raise TransferTimeout
    if failure:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            look()
            time.sleep(POLL_S)
        raise failure[0]
    world.abandoned = False
    return result[0]


class Checksums:
    """Two numbers for each bucket, computed where it is: they change with every word and with the words' order.

    The words, int64, make rows of `ROW_BYTES`. One number is the sum of the rows' sums, each times its rank, the other
    the same of the columns. A moved word changes its row or its column.
    """

    def __init__(self, bucket_sizes: Sequence[int], device: torch.device | None) -> None:
        """Sizes in bytes, whole rows each."""
        n, longest = len(bucket_sizes), max(bucket_sizes, default=0) // ROW_BYTES
        self._rows = torch.zeros(n, longest, dtype=torch.int64, device=device)
        self._columns = torch.zeros(n, ROW_BYTES // 8, dtype=torch.int64, device=device)
        self._ranks = torch.arange(1, max(longest, ROW_BYTES // 8) + 1, device=device)

    def take(self, number: int, bucket: Tensor) -> None:
        """Reads a bucket, without waiting for it."""
        words = bucket.view(torch.int64).view(len(bucket) // ROW_BYTES, ROW_BYTES // 8)
        torch.sum(words, 1, out=self._rows[number, : len(words)])
        torch.sum(words, 0, out=self._columns[number])

    def read(self) -> list[list[int]]:
        """Waits until all buckets have been read."""
        sums = [(part * self._ranks[: part.shape[1]]).sum(1) for part in (self._rows, self._columns)]
        return torch.stack(sums, 1).tolist()
