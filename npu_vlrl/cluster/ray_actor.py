"""Ray actor on a machine for each process of a run: it starts the process as its child, reads its output and ends it.

A child isolates crashes, signals and memory from Ray's worker, and its exit code is known. Only the standard library is
imported, so that the worker stays small, and arguments and results are strings and numbers.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

CHUNK = 2**16
WAITING_CHUNKS = 256
"""Largest number of chunks of output that the driver has not fetched; beyond it the child blocks."""
LAST_WORDS_S = 2.0
"""Seconds to wait for output after a child's end; its own children may hold its output open for longer."""

Chunk = tuple[int, bytes]
"""Chunk of output, after 1 for standard output or 2 for standard error."""


class ProcessActor:
    """Actor that runs one process. Ray calls `listen` in one thread and the other methods in another."""

    def __init__(self) -> None:
        self._output: queue.Queue[Chunk | int] = queue.Queue(WAITING_CHUNKS)
        self._child: subprocess.Popen[bytes] | None = None

    def devices(self, variable: str) -> str:
        """Devices of Ray's worker, separated by commas; sorted, as some platforms need and Ray does not."""
        devices = os.environ.get(variable, "").split(",")
        return ",".join(sorted(devices, key=int) if all(map(str.isdecimal, devices)) else devices)

    def free_port(self) -> int:
        with socket.socket() as listener:
            listener.bind(("", 0))
            port: int = listener.getsockname()[1]
            return port

    def write_mark(self, mark: str) -> str | None:
        """Makes a file that the other machines should see. Returns the reason for which it cannot, or None."""
        try:
            Path(mark).parent.mkdir(parents=True, exist_ok=True)
            Path(mark).touch()
        except OSError as error:
            return str(error)
        return None

    def sees(self, path: str) -> bool:
        return Path(path).exists()

    def remove_mark(self, mark: str) -> None:
        Path(mark).unlink(missing_ok=True)

    def start(self, command: str, config: str, folder: str, variables: Mapping[str, str]) -> str | None:
        """Starts `npu_vlrl COMMAND` in `folder` with `config` (YAML) and, besides this worker's, `variables`.

        Returns the reason for which it cannot, or None.
        """
        if not Path(folder).is_dir():
            return f"{folder}, where the run was started, is not there; all machines need the same folders"
        scratch = Path(tempfile.mkdtemp(prefix="npu-vlrl-"))
        (scratch / "config.yaml").write_text(config, encoding="utf-8")
        # Ray's workers hold SIGINT back, and a child inherits that from the thread that starts it
        held = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "npu_vlrl", command, "--config", str(scratch / "config.yaml")],
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes from the driver alone, wherever this machine is
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        self._child = child
        assert child.stdout is not None and child.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(number, pipe), daemon=True)
            for number, pipe in ((1, child.stdout), (2, child.stderr))
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(child, readers, scratch), daemon=True).start()
        return None

    def listen(self) -> tuple[list[Chunk], int | None]:
        """Waits until the child writes or ends; returns its output, and its exit code (-n for signal n) or None."""
        output: list[Chunk] = []
        while True:
            one = self._output.get()
            if isinstance(one, int):
                return output, one
            output.append(one)
            if self._output.empty():
                return output, None

    def send(self, number: int) -> None:
        """Sends a signal to the child while it lives; SIGKILL also to its own children."""
        if self._child is None:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self._child.pid, number)
            else:
                self._child.send_signal(number)
        except ProcessLookupError:
            pass

    def _read(self, number: int, pipe: IO[bytes]) -> None:
        while chunk := os.read(pipe.fileno(), CHUNK):
            self._output.put((number, chunk))

    def _wait(self, child: subprocess.Popen[bytes], readers: list[threading.Thread], scratch: Path) -> None:
        code = child.wait()
        for reader in readers:
            reader.join(LAST_WORDS_S)
        shutil.rmtree(scratch, ignore_errors=True)
        self._output.put(code)
