"""The program's side of worker processes: a deadline is kept by killing the process.

An answer of a model is hostile input: a tower of powers or a huge factorial keeps a computer-algebra system busy for
ever, often inside one C call that no signal handler or thread can interrupt.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import npu_vlrl
from npu_vlrl.types import Image
from npu_vlrl.workflow.workers.wire import Content, receive, send

START_LIMIT_S = 120.0
"""Seconds for a worker to start and import its service; not part of the deadline of a request."""

Reply = tuple[Content, tuple[Image, ...]]


class WorkerError(RuntimeError):
    """A request was not answered: its worker died or passed the deadline."""


def check_limits(who: str, workers: int, deadline_s: float) -> None:
    """Raises ValueError for numbers that no pool can have; `who` names the user of the pool, e.g. "judge"."""
    if workers < 1:
        raise ValueError(f"a {who} pool needs at least 1 worker, got {workers}")
    if not 0 < deadline_s <= 3600:
        raise ValueError(f"the deadline of a {who} is {deadline_s} s; it must be above 0 and at most 3600")


class WorkerPool:
    """Answers requests in `workers` processes, first come, first served; usable from any thread.

    Processes start when first needed, are replaced when they die or are killed, and end with the pool, at the latest
    with the program. Close the pool anyway: it frees them at once.

    Example: `WorkerPool("npu_vlrl.workflow.tools.worker", {"function": "my.py:f"}, "the tool 'f'", 1, 5.0).start()`
    """

    def __init__(self, service: str, options: Mapping[str, Any], name: str, workers: int, deadline_s: float) -> None:
        """`service`: dotted name of its module; `options`: JSON for it; `name`: what to call it in errors."""
        setup = json.dumps({"service": service, "options": dict(options), "deadline_s": deadline_s})
        self._workers = [_Worker(name, setup, deadline_s) for _ in range(workers)]
        # Last in, first out: as long as one process keeps up, the others are not started.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="worker")
        self._finalizer = weakref.finalize(self, _stop, self._threads, self._workers)

    def start(self) -> Any:
        """Starts one process, the first to be used, and returns its hello. Raises ValueError when it cannot start."""
        return self._workers[-1].start()

    def submit(self, request: Mapping[str, Any], images: Sequence[Image] = ()) -> Future[Reply]:
        """The future answer. Its deadline begins when a worker takes the request.

        The future raises WorkerError when the worker dies or is late, and ValueError when none can be started: that
        would happen to every request.
        """
        return self._threads.submit(self._ask, request, images)

    def close(self) -> None:
        """Kills the workers; requests under way raise WorkerError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True)
        self._finalizer()

    def _ask(self, request: Mapping[str, Any], images: Sequence[Image]) -> Reply:
        worker = self._idle.get()
        try:
            return worker.ask(request, images)
        finally:
            self._idle.put(worker)


class _Worker:
    """The program's side of one process; used by one thread at a time, except `kill`."""

    def __init__(self, name: str, setup: str, deadline_s: float) -> None:
        self._name = name
        self._setup = setup
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(self, request: Mapping[str, Any], images: Sequence[Image]) -> Reply:
        if self._process is None or self._process.poll() is not None:
            self.start()
        return self._exchange((request, images), self._deadline_s)

    def start(self) -> Any:
        """Starts the process, waits until it has opened its service and returns its hello."""
        self.stop()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "npu_vlrl.workflow.workers.serve", str(theirs.fileno()), self._setup],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the program's; and a kill takes the worker's children along
            )
        try:
            reply, _ = self._exchange(None, START_LIMIT_S)
        except WorkerError as error:
            raise ValueError(f"no worker for {self._name} could be started: {error}") from error
        if "error" in reply:
            self.stop()
            raise ValueError(reply["error"])
        return reply["ready"]

    def stop(self) -> None:
        if self._process is not None and self._connection is not None:
            self.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None

    def kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:  # once reaped, its number may belong to a stranger
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _exchange(self, request: tuple[Mapping[str, Any], Sequence[Image]] | None, limit_s: float) -> Reply:
        """Sends a request, if any, and waits for one message; raises WorkerError on death or after `limit_s`."""
        assert self._connection is not None and self._process is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        try:
            if request is not None:
                send(self._connection, *request)
            return receive(self._connection)
        except (EOFError, OSError) as error:
            if late.is_set():
                raise WorkerError(f"{self._name} took longer than {limit_s:g} s and was stopped") from error
            raise WorkerError(f"the worker of {self._name} {self._cause_of_death()}") from error
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self.stop()

    def _cause_of_death(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _stop(threads: ThreadPoolExecutor, workers: Sequence[_Worker]) -> None:
    """Ends the processes of a pool that no thread uses any more."""
    threads.shutdown(wait=False)
    for worker in workers:
        worker.stop()


def _environment() -> dict[str, str]:
    """The program's environment, in which a worker finds this package and keeps to one core."""
    root = str(Path(npu_vlrl.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
