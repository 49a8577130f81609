"""Judges: rules in worker processes that can be killed, and harmless rules in place.

An answer is hostile input: a tower of powers or a huge factorial keeps a computer-algebra system busy for ever, often
inside one C call that no signal handler or thread can interrupt. So such rules run in a process of their own, and the
deadline is kept by killing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import npu_vlrl
from npu_vlrl.types import DataError, Image, JudgeError, Task, Turn, Verdict

START_LIMIT_S = 120.0
"""Seconds for a worker to start and import its rule; not part of the deadline of an answer."""


class InlineJudge:
    """Runs a rule in place; only for rules whose time is linear in the text.

    Example: `InlineJudge(tagged.score, tagged.check_gold)`
    """

    def __init__(self, score: Callable[[str, str], Verdict], check_gold: Callable[[str], None]) -> None:
        self._score = score
        self.check_gold = check_gold

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        return self._score(_gold(task), text)

    def close(self) -> None:
        """Nothing to release."""


class JudgePool:
    """Judges answers in `workers` processes, first come, first served; usable from any event loop and thread.

    Processes start when first needed, are replaced when they die or are killed, and end with the pool, at the latest
    with the program. Close the pool anyway: it frees them at once.

    Example: `verdict = await JudgePool("math_verify", {}, workers=2, deadline_s=5.0).judge(task, text, [])`
    """

    def __init__(self, rule: str, options: Mapping[str, Any], workers: int = 1, deadline_s: float = 5.0) -> None:
        """Raises ValueError for a bad number, or when the user's file or function of a `python` rule cannot be used."""
        if workers < 1:
            raise ValueError(f"a judge pool needs at least 1 worker, got {workers}")
        if not 0 < deadline_s <= 3600:
            raise ValueError(f"the deadline of a judge is {deadline_s} s; it must be above 0 and at most 3600")
        self._rule = rule
        self._workers = [_Worker(rule, options, deadline_s) for _ in range(workers)]
        # Last in, first out: as long as one process keeps up, the others are not started.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="judge")
        self._finalizer = weakref.finalize(self, _stop, self._threads, self._workers)
        if rule == "python":
            self._workers[-1].start()

    async def judge(self, task: Task, text: str, history: Sequence[Turn]) -> Verdict:
        """Raises JudgeError when the rule raises, dies or passes the deadline; DataError when the gold is at fault.

        Raises ValueError when the rule cannot be started at all: that would fail for every answer.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._judge, task, text, tuple(history))

    def check_gold(self, answer: str) -> None:
        """Blocks for at most the deadline. Raises DataError when `answer` cannot be judged against, or not in time.

        Fits a data loader as it is: a plain function that is safe on hostile golds.
        """
        if self._rule == "python":
            return
        try:
            self._threads.submit(self._ask, {"answer": answer}, ()).result()
        except JudgeError as error:
            raise DataError(f"the gold answer {answer[:80]!r} cannot be judged: {error}") from error

    def close(self) -> None:
        """Kills the workers; judgements under way raise JudgeError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True)
        self._finalizer()

    def _judge(self, task: Task, text: str, history: tuple[Turn, ...]) -> Verdict:
        images: tuple[Image, ...] = ()
        if self._rule == "python":
            images = (*task.images, *(image for turn in history for tool in turn.tool_results for image in tool.images))
            request = {
                "task": _plain_task(task),
                "history": [turn.text for turn in history],
                "images": [image.size for image in images],
            }
        else:
            request = {"answer": _gold(task)}
        try:
            return Verdict(**self._ask({**request, "text": text}, images))
        except JudgeError as error:
            raise JudgeError(f"task {task.id}: {error}") from error
        except DataError as error:
            raise DataError(f"task {task.id}: {error}") from error

    def _ask(self, request: Mapping[str, Any], images: Sequence[Image]) -> Any:
        worker = self._idle.get()
        try:
            return worker.ask(request, images)
        finally:
            self._idle.put(worker)


class _Worker:
    """The parent's side of one worker process; used by one thread at a time, except `kill`."""

    def __init__(self, rule: str, options: Mapping[str, Any], deadline_s: float) -> None:
        self._rule = rule
        self._setup = json.dumps({"rule": rule, "options": dict(options), "deadline_s": deadline_s})
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(self, request: Mapping[str, Any], images: Sequence[Image]) -> Any:
        if self._process is None or self._process.poll() is not None:
            self.start()
        frames = [json.dumps(request).encode(), *(image.rgb.tobytes() for image in images)]
        reply = self._exchange(frames, self._deadline_s)
        if "data_error" in reply:
            raise DataError(reply["data_error"])
        if "error" in reply:
            raise JudgeError(f"the rule {self._rule!r} failed: {reply['error']}")
        return reply["verdict"]

    def start(self) -> None:
        """Starts the process and waits until it has imported its rule. Raises ValueError when it cannot."""
        self.stop()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "npu_vlrl.workflow.rewards.worker", str(theirs.fileno()), self._setup],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the program's; and a kill takes the worker's children along
            )
        try:
            reply = self._exchange([], START_LIMIT_S)
        except JudgeError as error:
            raise ValueError(f"no worker for the rule {self._rule!r} could be started: {error}") from error
        if "error" in reply:
            self.stop()
            raise ValueError(f"the rule {self._rule!r} cannot be used: {reply['error']}")

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

    def _exchange(self, frames: Sequence[bytes], limit_s: float) -> dict[str, Any]:
        """Sends `frames` and waits for one reply; raises JudgeError when the process dies or takes too long."""
        assert self._connection is not None and self._process is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        try:
            for frame in frames:
                self._connection.send_bytes(frame)
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
            return reply
        except (EOFError, OSError) as error:
            if late.is_set():
                raise JudgeError(f"the rule {self._rule!r} took longer than {limit_s:g} s and was stopped") from error
            raise JudgeError(f"the worker of the rule {self._rule!r} {self._cause_of_death()}") from error
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


def _gold(task: Task) -> str:
    if task.answer is None:
        raise DataError(f"task {task.id} has no answer to judge against; fill its answer field or use another rule")
    return task.answer


def _plain_task(task: Task) -> dict[str, Any]:
    extra = {key: value for key, value in task.extra.items() if _is_json(value)}
    return {"id": task.id, "answer": task.answer, "data_source": task.data_source, "extra": extra}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
