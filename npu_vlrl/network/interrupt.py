"""Ctrl-C in a training: the first one ends it after the current step, a second one at once.

SIGHUP, which a closing terminal or connection sends, has the same effect, except in programs that ignore it from the
start, as under nohup. SIGTERM, by which a cluster's scheduler ends a job, has it in a training of one process; torchrun
sends SIGTERM for reasons of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from npu_vlrl.network.world import started_processes

SAME_S = 1.0
"""Seconds within which signals count as one: launchers pass Ctrl-C on to processes that the terminal signals, too."""

NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def hangup() -> tuple[signal.Signals, ...]:
    """SIGHUP, unless this process ignores it, as under nohup."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


class Interrupted(RuntimeError):
    """The user, a terminal or a scheduler ended the training where it can be resumed; the message says how."""


class CtrlC:
    """Records whether the user requested an end."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._by = NAMES[signal.SIGINT]

    @property
    def asked(self) -> bool:
        return self._first is not None

    def check(self, where: str) -> None:
        """Raises Interrupted if the user requested an end. `where` names work that a resumed run can begin again."""
        if self.asked:
            raise self.ended(f"in {where}")

    def ended(self, where: str) -> Interrupted:
        return Interrupted(f"ended {where}, as {self._by} asked for; go on with run.if_exists=resume")

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Context in which the first Ctrl-C is only recorded. In threads other than the main one it has no effect."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        taken = (signal.SIGINT, *hangup(), *((signal.SIGTERM,) if started_processes() == 1 else ()))
        before = {number: signal.signal(number, self._pressed) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._by = now, NAMES[number]
            again = "Ctrl-C" if number == signal.SIGHUP else f"{self._by} again"
            with suppress(OSError):  # the terminal may be gone. Not print: the signal may come in the middle of one
                os.write(2, f"\nnpu-vlrl: ending after the step in hand; {again} ends at once\n".encode())
        elif number != signal.SIGHUP and now - self._first > SAME_S:  # a closing terminal may send it several times
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
