"""Parent of a worker: passes on the beginning of its output, limits its memory and ends all its descendants.

The worker runs code that may fork, start daemons in sessions of their own, print without end or take all memory. As a
"child subreaper" (prctl(2)) the parent inherits whatever the worker's children leave behind, so nothing escapes it.
Standard library only, and one thread: it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_OUTPUT = 2**16
"""Maximum number of bytes that one process may print into the log of the run."""

OUT_OF_MEMORY = 222
"""Exit code of a worker that exceeded its memory limit."""

TICK_S = 0.1
"""Seconds between two checks of the memory."""

_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1  # of <linux/prctl.h>


def supervise(name: str, memory_mib: int, socket: int) -> None:
    """Forks, and returns in the child, the worker. The parent never returns; it exits as the worker does.

    `name` is the worker's name in messages, `memory_mib` the limit of the resident memory of the worker and its
    children together (0: none), `socket` a descriptor that is the worker's alone. SIGTERM, the death of the program or
    that of the worker ends all.
    """
    program = os.getppid()
    _prctl(_SUBREAPER, 1)
    output, theirs = os.pipe()
    worker = os.fork()
    if not worker:
        _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.close(output)
        for stream in (1, 2):  # what a user's function prints must not mix with the program's output
            os.dup2(theirs, stream)
        os.close(theirs)
        return
    os.close(theirs)
    os.close(socket)
    _exit_as(_Supervisor(name, memory_mib * 2**20, program, worker, output).run())


class _Supervisor:
    def __init__(self, name: str, memory: int, program: int, worker: int, output: int) -> None:
        self._name = name
        self._memory = memory
        self._program = program
        self._worker = worker
        self._output: int | None = output
        self._left = MAX_OUTPUT
        self._stopped = self._ended = False

    def run(self) -> int:
        """Supervises until the worker ends; returns its exit code, as `os.waitstatus_to_exitcode` gives it."""
        woken = self._wake_on_signals()
        code = None
        while code is None:
            files = [woken, *([] if self._output is None else [self._output])]
            ready, _, _ = select.select(files, [], [], TICK_S)
            if woken in ready:
                os.read(woken, 512)
            if self._output in ready:
                self._show()
            code = self._reap()
            if code is None and (self._stopped or os.getppid() != self._program):
                code = -signal.SIGKILL
            if code is None and self._memory and _memory(self._worker, self._memory) > self._memory:
                code = OUT_OF_MEMORY
        self._end_all()
        while self._output is not None and select.select([self._output], [], [], 0)[0]:
            self._show()
        return code

    def _wake_on_signals(self) -> int:
        """Descriptor that becomes readable when SIGTERM arrives or a child ends."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        return woken

    def _stop(self) -> None:
        self._stopped = True

    def _show(self) -> None:
        """Passes on the printed output, up to `MAX_OUTPUT`; the rest is read and dropped, lest the worker block."""
        assert self._output is not None
        text = os.read(self._output, 2**16)
        if not text:
            os.close(self._output)
            self._output = None
        elif self._left:
            shown, self._left = text[: self._left], self._left - min(self._left, len(text))
            _write(shown)
            if not self._left:
                limit = MAX_OUTPUT // 1024
                _write(f"\n{self._name} printed {limit} KiB; no more of this process is shown\n".encode())

    def _reap(self) -> int | None:
        """Reaps children that ended; returns the worker's exit code when it is among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == self._worker:
                self._ended = True
                return os.waitstatus_to_exitcode(status)
            if not pid:
                return None

    def _end_all(self) -> None:
        """Kills the worker and its descendants; children of a dead process become ours, and are killed next."""
        if not self._ended:
            os.kill(self._worker, signal.SIGKILL)
        while pids := _children(os.getpid()):
            for pid in pids:
                with contextlib.suppress(PermissionError):  # of another user, such as a setuid program
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _memory(worker: int, limit: int) -> int:
    """Resident memory of a process and its descendants, in bytes; pages that they share count once."""
    pids = [worker, *_descendants(worker)]
    total = sum(_resident(pid) for pid in pids)
    return total if total <= limit or len(pids) == 1 else sum(_proportional(pid) for pid in pids)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):  # it ended meanwhile
        return 0


def _proportional(pid: int) -> int:
    """Proportional set size of a process: a page shared by n processes counts 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(child) for t in threads for child in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except OSError:  # it ended meanwhile
        return []


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # the log of the run is gone
        os.write(2, text)


def _prctl(option: int, value: int) -> None:
    """Calls prctl; does nothing where there is none: outside Linux, daemons outlive their worker."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exit_as(code: int) -> None:
    """Ends this process as the worker ended, by the same signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.stderr.flush()
    os._exit(code if code >= 0 else 128 - code)
