"""Transfer of an update: a collective that can be given up, and checksums computed where the bytes are."""

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
"""Number of int64 words in a row of the checksum: it divides no power of two, and a row is a multiple of 16 bytes."""

POLL_S = 0.02
GRACE_S = 1.0
"""Seconds after the failure of a collective in which to look for the peer whose end is the reason."""


class TransferTimeout(Exception):
    """The collective took longer than it may."""


def guarded(collective: Callable[[], T], world: World, look: Callable[[], None], limit_s: float) -> T:
    """Runs a collective, and gives it up when `look`, which is called repeatedly, raises.

    A collective of a device waits for a dead process until a timeout of its own, if ever, and cannot be interrupted.
    It therefore runs in a thread, which is abandoned in that case; `world.abandoned` is then True.
    Raises TransferTimeout after `limit_s` seconds. When the collective itself raises, `look` is called for another
    second, and its error is preferred: the end of a process explains more than the error that it causes here.
    """
    result: list[T] = []
    failure: list[Exception] = []
    done = threading.Event()

    def work() -> None:
        try:
            world.enter_thread()  # inside, so that the error of a device that does not answer is caught
            result.append(collective())
        except Exception as error:
            failure.append(error)
        finally:
            done.set()

    world.start(work)
    world.abandoned = True  # until the collective has succeeded
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
    """A checksum for each bucket, computed on its device, which depends on every word and on the words' order.

    The int64 words form rows of `WORDS`, the last of which may be shorter; the checksum is the sum over columns of the
    column's sum times its rank. It detects words that are displaced to another column, and a displacement by a power of
    two always changes the column.
    """

    def __init__(self, count: int, device: torch.device | None) -> None:
        self._columns = torch.zeros(count, WORDS, dtype=torch.int64, device=device)
        self._ranks = torch.arange(1, WORDS + 1, device=device)

    def take(self, number: int, bucket: Tensor) -> None:
        """Reads a bucket, uint8 of a multiple of 8 bytes, without waiting for the device."""
        words = bucket.view(torch.int64)
        rows = len(words) // WORDS
        torch.sum(words[: rows * WORDS].view(rows, WORDS), 0, out=self._columns[number])
        rest = words[rows * WORDS :]
        self._columns[number, : len(rest)] += rest

    def read(self) -> list[int]:
        """Returns the checksums, once all buckets have been read."""
        return (self._columns * self._ranks).sum(1).tolist()
