"""Worker processes that run checks together, and can be killed: a hang or a crash ends them and nothing else."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from npu_vlrl.acceptance.plan import Check

Entry = dict[str, Any]
"""Result of a check: `status` ("ok", "failed" or "not tried"), `detail`, and numbers of its own."""

START_S = 180.0
"""Additional seconds for a worker that was just started, which first imports libraries and opens its device."""
GRACE_S = 3.0
"""Seconds in which the others may still report the cause, once one has failed."""
LINES = 15
"""Number of a process's last output lines that the report holds."""


class Crew:
    """Crew of `ranks` workers, each a process group of its own, so that a worker's children are killed with it."""

    def __init__(self, ranks: int, environment: Mapping[str, str], folder: Path) -> None:
        """`folder` holds the output of the workers."""
        self.ranks = ranks
        self.fresh = True
        self._selector = selectors.DefaultSelector()
        self._logs = [folder / f"{time.monotonic_ns()}.{rank}" for rank in range(ranks)]
        port = str(_free_port())
        everywhere = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        everywhere |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
        self._processes = [
            self._start(rank, {**environment, **everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]

    def _start(self, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        reader, writer = os.pipe()
        with self._logs[rank].open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "npu_vlrl.acceptance.worker", str(writer)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        self._selector.register(os.fdopen(reader, "rb", buffering=0), selectors.EVENT_READ, rank)
        return process

    def do(self, check: Check) -> Entry:
        """Runs a check, and returns its result. After any other status than "ok" the crew is unusable, and should be
        closed.
        """
        began = time.monotonic()
        limit = check.deadline_s + (START_S if self.fresh else 0.0)
        self.fresh = False
        request = {"function": check.function, "arguments": dict(check.arguments), "deadline_s": check.deadline_s}
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended, which shows below
                stdin: IO[bytes] = process.stdin  # type: ignore[assignment]
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
        answers, ended = self._wait(began + limit)
        entry = self._judge(answers, ended, limit)
        return {**entry, "seconds": round(time.monotonic() - began, 2)}

    def _wait(self, deadline: float) -> tuple[dict[int, Entry], list[int]]:
        """Replies by rank, and the ranks that ended without one, in that order. Returns early after a failure."""
        answers: dict[int, Entry] = {}
        ended: list[int] = []
        while len(answers) + len(ended) < self.ranks and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
                line = pipe.readline()
                if line:
                    answers[key.data] = json.loads(line)
                else:
                    self._selector.unregister(pipe)
                    ended.append(key.data)
                if not line or answers[key.data]["status"] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers, ended

    def _judge(self, answers: Mapping[int, Entry], ended: list[int], limit: float) -> Entry:
        """Result of a check: a crash precedes a failure that it causes, and that precedes a process that waits."""
        if ended:
            rank = ended[0]
            code = self._processes[rank].wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return {"status": "failed", "detail": f"{self._name(rank)} ended by {how}", "log": self._last_words(rank)}
        for rank, answer in sorted(answers.items()):
            if answer["status"] == "failed":
                return answer | {"detail": f"{self._name(rank)}: {answer['detail']}"} if self.ranks > 1 else answer
        late = [rank for rank in range(self.ranks) if rank not in answers]
        if late:
            for rank in late:
                with suppress(ProcessLookupError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)  # faulthandler says where it is
            time.sleep(0.5)
            names = " and ".join(map(self._name, late))
            return {
                "status": "failed",
                "detail": f"{names} did not end within {limit:g} s",
                "log": self._last_words(late[0]),
            }
        return next((a for a in answers.values() if a["status"] != "ok"), answers[0])

    def _name(self, rank: int) -> str:
        return "the process" if self.ranks == 1 else f"rank {rank} of {self.ranks}"

    def _last_words(self, rank: int) -> list[str]:
        return self._logs[rank].read_text(errors="replace").strip().splitlines()[-LINES:]

    def close(self) -> None:
        """Kills the workers and all their children."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
