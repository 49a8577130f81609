"""What moves the bytes of an update: a collective that can be given up, and checksums made where the bytes are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from npu_vlrl.sync.world import World

T = TypeVar("T")

WORDS = 64
"""int64 words in a row of the checksum; a bucket is a whole number of rows."""

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


def checksum(bucket: Tensor) -> Tensor:
    """Two numbers, int64 [2], computed where the bucket is: they change with every word and with the words' order.

    The words make rows of 64. One number is the sum of the rows' sums, each times its rank, the other the same of the
    columns. A moved word changes its row or its column.
    """
    words = bucket.view(torch.int64).view(-1, WORDS)
    return torch.stack([_ranked(words.sum(1)), _ranked(words.sum(0))])


def _ranked(values: Tensor) -> Tensor:
    return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()
