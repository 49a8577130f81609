"""Client side of the worker processes: a deadline is enforced by killing the process.

An answer of a model is hostile input: a tower of powers or a huge factorial keeps a computer-algebra system busy for
ever, often inside one C call that no signal handler or thread can interrupt.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
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
from npu_vlrl.workflow.workers.supervise import OUT_OF_MEMORY
from npu_vlrl.workflow.workers.wire import Content, Received, WireError, receive, send

START_LIMIT_S = 120.0
"""Seconds for a worker to start and import its service; not part of the deadline of a request."""

END_LIMIT_S = 5.0
"""Seconds for a worker to end with all that it started, before only its process group is killed."""

Reply = tuple[Content, tuple[Image, ...]]


class WorkerError(RuntimeError):
    """Raised when a request was not answered: its worker died or passed the deadline."""


class WrongReplyError(WorkerError):
    """Raised for a reply to another request, or from another process, such as one that the worker forked."""


def check_limits(who: str, workers: int, deadline_s: float) -> None:
    """Raises ValueError for invalid limits of a pool; `who` names the user of the pool, e.g. "judge"."""
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

    wrong_replies = 0
    """Number of replies that did not belong to their request; each ended its worker."""

    def __init__(
        self,
        service: str,
        options: Mapping[str, Any],
        name: str,
        workers: int,
        deadline_s: float,
        memory_mib: int = 0,
    ) -> None:
        """`service`: dotted name of its module; `options`: JSON for it; `name`: its name in errors; `memory_mib`: limit
        of the resident memory of a worker and its children, 0 disables.
        """
        setup = {"service": service, "options": dict(options), "name": name, "memory_mib": memory_mib}
        self._workers = [_Worker(name, setup, deadline_s) for _ in range(workers)]
        # Last in, first out: as long as one process keeps up, the others are not started.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="worker")
        self._finalizer = weakref.finalize(self, _stop, self._threads, self._workers)

    def start(self) -> Any:
        """Starts one process, the first to be used, and returns its hello. Raises ValueError when it cannot start."""
        return self._workers[-1].start()

    def submit(self, request: Mapping[str, Any], images: Sequence[Image] = ()) -> Future[Reply]:
        """Submits a request and returns its future reply. The deadline begins when a worker takes the request.

        A request with a wrong reply is repeated once, to a new process. The future raises WorkerError when the worker
        dies, is late or is wrong again, and ValueError when no worker can be started: that would fail for every
        request.
        """
        return self._threads.submit(self._ask, request, images)

    def close(self) -> None:
        """Kills the workers; requests in flight raise WorkerError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True)
        self._finalizer()

    def _ask(self, request: Mapping[str, Any], images: Sequence[Image]) -> Reply:
        worker = self._idle.get()
        try:
            try:
                return worker.ask(request, images)
            except WrongReplyError:
                self._count()
            try:
                return worker.ask(request, images)
            except WrongReplyError:
                self._count()
                raise
        finally:
            self._idle.put(worker)

    def _count(self) -> None:
        with self._counting:
            self.wrong_replies += 1


class _Worker:
    """Client side of one process; used by one thread at a time, except `kill`."""

    def __init__(self, name: str, setup: Mapping[str, Any], deadline_s: float) -> None:
        self._name = name
        self._setup = setup
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        """The supervisor process; the worker is its child."""
        self._connection: Connection | None = None
        self._pid = 0
        """Process id of the worker."""
        self._number = 0
        """Number of the last request to the worker."""

    def ask(self, request: Mapping[str, Any], images: Sequence[Image]) -> Reply:
        if self._process is None or self._process.poll() is not None:
            self.start()
        self._number += 1
        reply = self._exchange((request, images), self._deadline_s)
        if (reply.number, reply.pid) != (self._number, self._pid):
            raise self._wrong(f"a reply to request {reply.number} of process {reply.pid}")
        return reply.content, reply.images

    def start(self) -> Any:
        """Starts the process, waits until it has opened its service and returns its hello."""
        self.stop()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "npu_vlrl.workflow.workers.serve"),
                    *(str(theirs.fileno()), json.dumps(self._setup)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the program's
            )
        self._number = 0
        try:
            reply = self._exchange(None, START_LIMIT_S)
        except WorkerError as error:
            raise ValueError(f"no worker for {self._name} could be started: {error}") from error
        if "error" in reply.content:
            self.stop()
            raise ValueError(reply.content["error"])
        self._pid = reply.pid
        return reply.content["ready"]

    def stop(self) -> None:
        if self._process is not None and self._connection is not None:
            self.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None

    def kill(self) -> None:
        """Ends the process with all its descendants."""
        process = self._process
        if process is None or process.returncode is not None:  # once reaped, its number may belong to a stranger
            return
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _exchange(self, request: tuple[Mapping[str, Any], Sequence[Image]] | None, limit_s: float) -> Received:
        """Sends a request, if any, and waits for one message; raises WorkerError on death or after `limit_s`."""
        assert self._connection is not None and self._process is not None
        late = threading.Event()
        end = self._connection.fileno()

        def expire() -> None:
            late.set()
            self.kill()
            _shut_down(end)

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        failure: Exception | None = None
        try:
            if request is not None:
                send(self._connection, *request, self._number)
            return receive(self._connection)
        except (WireError, EOFError, OSError) as error:
            failure = error
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self.stop()
        if late.is_set():
            raise WorkerError(f"{self._name} took longer than {limit_s:g} s and was stopped") from failure
        if isinstance(failure, WireError):
            raise self._wrong(str(failure)) from failure
        raise WorkerError(f"the worker of {self._name} {self._cause_of_death()}") from failure

    def _wrong(self, what: str) -> WrongReplyError:
        self.stop()
        return WrongReplyError(
            f"the worker of {self._name} was ended, since another process writes in its place: {what}; let the "
            "function wait for the processes that it forks"
        )

    def _cause_of_death(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.stop()
            return "closed its connection, and was stopped"
        if code == OUT_OF_MEMORY:
            return (
                f"took more than {self._setup['memory_mib']} MiB of memory with its children and was stopped "
                "(reward.memory_mib, workflow.tool_memory_mib)"
            )
        return f"exited with code {code}" if code >= 0 else f"was killed by {_signal(-code)}"


def _shut_down(end: int) -> None:
    """Shuts a socket down, which wakes its readers and writers even where a foreign process holds the other end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end)) as other:
        other.shutdown(socket.SHUT_RDWR)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals between the first and the last
        return f"signal {number}"


def _stop(threads: ThreadPoolExecutor, workers: Sequence[_Worker]) -> None:
    """Ends the processes of a pool that no thread uses any more."""
    threads.shutdown(wait=False)
    for worker in workers:
        worker.stop()


def _environment() -> dict[str, str]:
    """Environment variables of a worker, with which it finds this package and uses one core."""
    root = str(Path(npu_vlrl.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
