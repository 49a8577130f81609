"""Report of an acceptance test: a JSON file, rewritten after each check, so that an abort leaves the earlier
results."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from npu_vlrl.acceptance.crew import Crew, Entry
from npu_vlrl.acceptance.plan import FACTS, ONE_DEVICE, Check, checks
from npu_vlrl.common.atomic_files import write_text
from npu_vlrl.common.exit_codes import BAD_INPUT, DONE, FAILED

LIMIT_S = 1800.0
"""Seconds after which no check begins: on a machine where everything hangs, each would wait for its deadline."""

ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b")


def write_report(file: Path) -> int:
    """Runs all checks. Returns 0 when none failed, 1 when one did, and 2 without the hardware.

    Raises an OSError that names the file where it cannot be written. The file holds no names of hosts or users, no
    addresses and no values of variables that may be secret.
    """
    report = _Report(file)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # kills the workers on its way
    with tempfile.TemporaryDirectory(prefix="npu_vlrl_") as folder, _crews(Path(folder)) as do:
        facts = do(FACTS)
        if facts["status"] != "ok":
            report.end(problem=facts["detail"], log=facts.get("log", []))
            print(f"npu-vlrl: {_scrubbed(facts['detail'])}", file=sys.stderr)
            return BAD_INPUT
        report.begin(facts)
        do.environment = {**facts["launch_environment"], **do.environment}
        for check in checks(facts):
            late = report.seconds > LIMIT_S
            entry = {"status": "not tried", "detail": f"{LIMIT_S:g} s were over"} if late else _applied(check, do)
            report.add(check, entry)
    report.end()
    return FAILED if report.failed else DONE


def _applied(check: Check, do: _Crews) -> Entry:
    if check.ranks == ONE_DEVICE:
        return {"status": "not tried", "detail": "takes two devices, and one is visible"}
    return do(check)


class _Crews:
    """Gives each check a crew of its size: the previous one, unless something failed in it."""

    def __init__(self, folder: Path) -> None:
        self.environment: dict[str, str] = dict(os.environ)
        self._folder = folder
        self._crew: Crew | None = None

    def __call__(self, check: Check) -> Entry:
        if self._crew is not None and (check.fresh or self._crew.ranks != check.ranks):
            self.close()
        if self._crew is None:
            self._crew = Crew(check.ranks, self.environment, self._folder)
        entry = self._crew.do(check)
        if entry["status"] != "ok":  # what was refused may have left a mess, too: a capture that nobody ended
            self.close()
        return entry

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None


@contextmanager
def _crews(folder: Path) -> Iterator[_Crews]:
    crews = _Crews(folder)
    try:
        yield crews
    finally:
        crews.close()


class _Report:
    """The file of the report."""

    def __init__(self, file: Path) -> None:
        """Writes a first version, which shows that the file is writable."""
        self.file = file
        self.failed = 0
        self._began = time.monotonic()
        self._content: dict[str, Any] = {
            "format": 1,
            "complete": False,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "checks": [],
        }
        self._write()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def begin(self, facts: Entry) -> None:
        shown = ("platform", "sizes", "versions", "machine", "devices", "environment", "warnings", "kernels")
        self._content = {
            **{name: value for name, value in self._content.items() if name != "checks"},
            **{name: facts[name] for name in shown},
            "launch_environment": facts["launch_environment"],
            "checks": [],
        }
        self._write()
        print(f"{facts['detail']}; sizes: {facts['sizes']}", flush=True)

    def add(self, check: Check, entry: Entry) -> None:
        if entry["status"] == "failed":
            self.failed += 1
            entry = {**entry, "turned_off_by": check.turned_off_by}
        line = {"name": check.name, **entry}
        for name in ("detail", "log", "cases"):
            if name in line:
                line[name] = _scrubbed(line[name])
        self._content["checks"].append(line)
        self._write()
        verdict = "FAILED" if entry["status"] == "failed" else entry["status"]
        print(f"{self.seconds:6.1f} s  {check.name}: {verdict}: {line['detail']}", flush=True)
        if entry["status"] == "failed":
            print(f"{'':10}turned off by {check.turned_off_by}", flush=True)

    def end(self, **more: Any) -> None:
        self._content |= {"complete": True, "seconds": round(self.seconds, 1)}
        self._content |= {name: _scrubbed(value) for name, value in more.items()}
        self._content["failed"] = [line["name"] for line in self._content["checks"] if line["status"] == "failed"]
        self._write()
        print(f"{self.failed} checks failed; the report is {self.file}", flush=True)

    def _write(self) -> None:
        write_text(self.file, json.dumps(self._content, indent=1) + "\n")


def _scrubbed(value: Any) -> Any:
    """A text, or texts in lists and objects, without this machine's name, home folder and addresses."""
    if isinstance(value, list):
        return [_scrubbed(one) for one in value]
    if isinstance(value, dict):
        return {name: _scrubbed(one) for name, one in value.items()}
    if not isinstance(value, str):
        return value
    for secret, name in ((str(Path.home()), "~"), (socket.gethostname(), "HOST")):
        value = value.replace(secret, name) if len(secret) > 1 else value
    return ADDRESS.sub("ADDRESS", value)
