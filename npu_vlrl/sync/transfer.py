"""What moves the bytes of an update: a collective that can be given up, and checksums made where the bytes are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from npu_vlrl.network.world import World

T = TypeVar("T")

WORDS = 8190
"""int64 words in a row of the checksum: no power of two is a multiple of it, and rows are a multiple of 16 bytes."""

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
            world.enter_thread()  # in here, so that a device that does not answer is heard of
            result.append(collective())
        except Exception as error:
            failure.append(error)
        finally:
            done.set()

    world.start(work)
    world.abandoned = True  # until all is well
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
    """A number for each bucket, computed where it is, which changes with every word and with the words' order.

    The words, int64, make rows of `WORDS`, the last of which may be shorter; the number is the sum of their columns,
    each times its rank. Words that change places are noticed, unless they stay in their column, which no displacement
    by a power of two does.
    """

    def __init__(self, count: int, device: torch.device | None) -> None:
        self._columns = torch.zeros(count, WORDS, dtype=torch.int64, device=device)
        self._ranks = torch.arange(1, WORDS + 1, device=device)

    def take(self, number: int, bucket: Tensor) -> None:
        """Reads a bucket, uint8 [whole words], without waiting for it."""
        words = bucket.view(torch.int64)
        whole = len(words) // WORDS
        torch.sum(words[: whole * WORDS].view(whole, WORDS), 0, out=self._columns[number])
        rest = words[whole * WORDS :]
        self._columns[number, : len(rest)] += rest

    def read(self) -> list[int]:
        """Waits until all buckets have been read."""
        return (self._columns * self._ranks).sum(1).tolist()
