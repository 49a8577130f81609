"""Driver: the process that the user starts when Ray places the others; it shows their output and restarts them."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from npu_vlrl.cluster.placement import Place, bundles, connected, reserved
from npu_vlrl.cluster.ray_actor import Chunk
from npu_vlrl.common.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED
from npu_vlrl.config import Config, ConfigError, dump_config
from npu_vlrl.hardware import VARIABLE, Platform, select
from npu_vlrl.network.interrupt import hangup

LEARNER = 0

TICK_S = 0.5
"""Seconds between checks of signals and of the clock."""
GRACE_S = 10.0
"""Seconds from the end of one process until the others get SIGTERM, in which they notice and report the reason."""
KILL_S = 40.0
"""Seconds from the end of one process until the others are killed."""


def drive(config: Config, command: str) -> int:
    """Runs `npu_vlrl COMMAND` in `ray.processes` processes of a Ray cluster; returns the exit code.

    When one fails all end, and start again from the last checkpoint up to `ray.restarts` times, except after bad input,
    which would fail again.

    Raises ConfigError without such a cluster or enough resources in it, and HardwareError.
    """
    platform = select()
    try:
        with connected(config, platform) as ray:
            return _attempts(ray, config, command, platform)
    except KeyboardInterrupt:  # before all had started
        return INTERRUPTED


def _attempts(ray: Any, config: Config, command: str, platform: Platform) -> int:
    restarts = 0
    while True:
        try:
            with reserved(ray, bundles(config, platform), platform) as places, Processes(ray, places) as processes:
                processes.start(config, command, platform)
                code = processes.follow()
        except ConfigError as error:
            if not restarts:
                raise
            _say(f"the run failed: {error}")  # too little is left of the cluster
            return FAILED
        if code != FAILED or processes.end_requested or restarts == config.ray.restarts:
            return code
        restarts += 1
        _say(f"starting all again from the last checkpoint (restart {restarts} of {config.ray.restarts})")
        config = config.model_copy(update={"run": config.run.model_copy(update={"if_exists": "resume"})})


class Processes:
    """The processes of one attempt, by rank. Use it as a context, whose end kills all processes."""

    def __init__(self, ray: Any, places: Sequence[Place]) -> None:
        self._ray = ray
        self._places = tuple(places)
        self._codes: dict[int, int] = {}
        """Exit codes of the ended processes, by rank; -n for signal n."""
        self._unfinished = [b""] * len(places)
        """Beginning of each process's unfinished line."""
        self._signals: list[int] = []
        self._pressures = [(GRACE_S, signal.SIGTERM), (KILL_S, signal.SIGKILL)]
        self._ending_since: float | None = None
        self.end_requested = False
        """Whether the user requested the end."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._send(signal.SIGKILL))

    def start(self, config: Config, command: str, platform: Platform) -> None:
        """Starts the processes. Raises ConfigError when a machine does not see the run folder."""
        first, folder = self._places[LEARNER], os.getcwd()
        local_sizes = Counter(place.node for place in self._places)
        if len(local_sizes) > 1:
            self._check_shared(Path(folder, config.run.dir))
        shared = {
            **{
                name: os.environ.get(name, setting.value)
                for name, setting in platform.launch_environment.items()
                if setting.wanted
            },
            VARIABLE: platform.name,
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(len(self._places)),
            "LOCAL_RANK": "0",  # Ray shows each process its own devices only
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(self._ray.get(first.actor.free_port.remote())),
        }
        text, started = dump_config(config), []
        for rank, place in enumerate(self._places):
            own = {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(local_sizes[place.node])}
            if place.devices:
                own[str(platform.visible_devices_variable)] = place.devices
            started.append(place.actor.start.remote(command, text, folder, {**shared, **own}))
        for place, problem in zip(self._places, self._ray.get(started), strict=True):
            if problem is not None:
                raise ConfigError(f"ray.processes: {place} cannot start a process: {problem}")
        for node in local_sizes:
            there = [(rank, place) for rank, place in enumerate(self._places) if place.node == node]
            devices = ", ".join(place.devices for _, place in there if place.devices)
            ranks = ", ".join(str(rank) for rank, _ in there)
            on = f" on {platform.ray_resource} {devices}" if devices else ""
            _say(f"{there[0][1]} has rank {ranks}{on}")

    def _check_shared(self, run_dir: Path) -> None:
        """Raises ConfigError when a machine does not see the run folder: one machine writes the checkpoint, and after a
        restart another one may read it.
        """
        get, first = self._ray.get, self._places[LEARNER]
        mark = str(run_dir.with_name(f".{run_dir.name}.{secrets.token_hex(8)}"))
        problem = get(first.actor.write_mark.remote(mark))
        if problem is not None:
            raise ConfigError(f"run.dir: {run_dir} cannot be made on {first} ({problem}); choose another")
        seen = get([place.actor.sees.remote(mark) for place in self._places])
        get(first.actor.remove_mark.remote(mark))
        blind = [str(place) for place, sees in zip(self._places, seen, strict=True) if not sees]
        if blind:
            raise ConfigError(
                f"run.dir: {run_dir} on {first} is not the folder of that name on {blind[0]}; choose one that all "
                "machines share"
            )

    def follow(self) -> int:
        """Shows the output of the processes until all have ended; returns the exit code of the run."""
        asked = {place.actor.listen.remote(): rank for rank, place in enumerate(self._places)}
        with self._listening_to_signals():
            while asked:
                ready, _ = self._ray.wait(list(asked), timeout=TICK_S)
                for answer in ready:
                    rank = asked.pop(answer)
                    if not self._handle_output(rank, answer):
                        asked[self._places[rank].actor.listen.remote()] = rank
                self._follow_signals()
                self._press()
        if signal.SIGINT in self._signals:
            return INTERRUPTED
        if self._codes[LEARNER] == DONE:
            return DONE
        return BAD_INPUT if BAD_INPUT in self._codes.values() else FAILED

    def _handle_output(self, rank: int, answer: Any) -> bool:
        """Shows the output of a process; returns whether the process has ended."""
        output: list[Chunk]
        try:
            output, code = self._ray.get(answer)
        except self._ray.exceptions.RayError:
            output, code, end = [], FAILED, "is lost: its machine, or Ray on it, is gone"
        else:
            end = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        self._show(rank, output, code is not None)
        if code is None:
            return False
        expected = self.end_requested or self._ending_since is not None  # later ends follow from the first
        if code not in (DONE, BAD_INPUT) and not expected:
            _say(f"{_name(rank)} on {self._places[rank]} {end}")
        self._codes[rank] = code
        if self._ending_since is None and (code != DONE or rank == LEARNER):
            self._ending_since = time.monotonic()
        return True

    def _show(self, rank: int, output: Sequence[Chunk], ended: bool) -> None:
        """Shows the learner's output unchanged, and lines of the others on standard error, with their names."""
        for number, data in output:
            if rank == LEARNER:
                _write(sys.stdout if number == 1 else sys.stderr, data)
            else:
                *lines, self._unfinished[rank] = (self._unfinished[rank] + data).split(b"\n")
                self._show_lines(rank, lines)
        if ended and self._unfinished[rank]:
            self._show_lines(rank, [self._unfinished[rank]])

    def _show_lines(self, rank: int, lines: Sequence[bytes]) -> None:
        _write(sys.stderr, b"".join(b"[%s] %s\n" % (_name(rank).encode(), line) for line in lines))

    @contextmanager
    def _listening_to_signals(self) -> Iterator[None]:
        """Context in which signals are recorded, for `_follow_signals`."""
        numbers = (signal.SIGINT, signal.SIGTERM, *hangup())
        before = [signal.signal(number, lambda number, frame: self._signals.append(number)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _follow_signals(self) -> None:
        """Follows recorded signals: the first Ctrl-C or SIGHUP is sent to the learner, which ends the others; a second
        Ctrl-C kills all.
        """
        if not self._signals:
            return
        if not self.end_requested:
            self.end_requested = True
            if signal.SIGTERM not in self._signals and self._signals.count(signal.SIGINT) < 2:
                _say("stopping; Ctrl-C again kills all processes")
                self._places[LEARNER].actor.send.remote(signal.SIGINT)
        now = time.monotonic()
        if self._signals.count(signal.SIGINT) > 1:
            self._ending_since = now - KILL_S
        elif signal.SIGTERM in self._signals and self._ending_since is None:
            self._ending_since = now - GRACE_S

    def _press(self) -> None:
        """Sends signals to processes that still run a while after the end of another one."""
        if self._ending_since is None:
            return
        while self._pressures and time.monotonic() - self._ending_since >= self._pressures[0][0]:
            self._send(self._pressures.pop(0)[1])

    def _send(self, number: signal.Signals) -> list[Any]:
        living = [place for rank, place in enumerate(self._places) if rank not in self._codes]
        return [place.actor.send.remote(int(number)) for place in living]


def _name(rank: int) -> str:
    return f"engine {rank}" if rank != LEARNER else "learner"


def _say(text: str) -> None:
    _write(sys.stderr, f"npu-vlrl: {text}\n".encode())


def _write(stream: TextIO, data: bytes) -> None:
    """Writes to a stream. It may be closed already, which must not stop the processes before their checkpoint."""
    with suppress(OSError):
        stream.flush()
        stream.buffer.write(data)
        stream.flush()
