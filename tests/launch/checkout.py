"""A checkout with the launch scripts and a Python that only writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# `-m venv … DIR` makes an environment whose python is this script again. pip fails while the file `offline` exists, and
# remembers NAME==VERSION as installed. $RECORD gets what was asked for, $RECORD.environment a training's variables.
FAKE_PYTHON = """#!/usr/bin/env bash
packages=$(dirname "$0")/packages
case "$1 $2" in
"-c "*importlib.metadata*) ls "$packages/$3=="${4:-*} >/dev/null 2>&1; exit ;;
"-c "*device_count*) echo "${DEVICES:-2}"; exit ;;
"-c "*tests.host_cann*) echo "export HOST_CANN_DEVICES=2"; exit ;;
"-c "*getaddrinfo*) [[ $3 != *.invalid ]]; exit ;;
"-c "*) exit "${PYTHON_UNSUITABLE:-0}" ;;
"--version "*) echo "Python 3.11.99"; exit ;;
esac
echo "$@" >>"$RECORD"
case "$1 $2" in
"-m venv") rm -rf "${@: -1}"; mkdir -p "${@: -1}/bin/packages"; cp "$0" "${@: -1}/bin/python" ;;
"-m pip")
    sleep "${PIP_SECONDS:-0}"
    [[ ! -e offline ]] || exit 1
    for word in "$@"; do
        if [[ $3 == install && $word == *==* ]]; then touch "$packages/$word"; fi
    done ;;
"-m npu_vlrl.hardware")
    echo "npu-vlrl: no such hardware" >&2
    [[ -n ${HARDWARE-1} ]] || exit 2
    echo 'export A_SETTING=${A_SETTING-recommended}  # the reason' ;;
"-m npu_vlrl")
    [[ $3 != data ]] || { mkdir -p "$6"; touch "$6/test.parquet"; }
    [[ $3 != config ]] || { printf "${RESOLVED:-}"; exit "${CONFIG_CODE:-0}"; }
    [[ $3 != train ]] || { env >"$RECORD.environment"; exit 7; } ;;
"-m torch.distributed.run") env >"$RECORD.environment"; exit 7 ;;
esac
"""

FAKE_UNAME = '#!/bin/sh\ncase "$1" in -m) echo "${MACHINE:-aarch64}";; *) echo Linux;; esac\n'


class Ran(NamedTuple):
    code: int
    asked: list[str]
    """What Python was asked for."""
    said: str
    """Standard error."""
    shown: str
    """Standard output."""


class Checkout:
    """A folder with the launch scripts and requirements, but no package, on Linux and a MACHINE (aarch64)."""

    def __init__(self, root: Path) -> None:
        self.root = root / "with a space"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        for file in (*ROOT.glob("requirements-*.txt"), ROOT / "pyproject.toml"):
            shutil.copy(file, self.root)
        self.tools = root / "tools"
        self.tools.mkdir()
        self.home = root / "home"
        self.home.mkdir()
        self.record = root / "record"
        self.python = self.tools / "a-python"
        self.program("a-python", FAKE_PYTHON)
        self.program("uname", FAKE_UNAME)

    def program(self, name: str, text: str) -> None:
        """Puts a program in front of the others of its name."""
        file = self.tools / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def run(self, script: str, *arguments: str, **variables: str) -> Ran:
        self.record.write_text("")
        ours = ("NPU_VLRL", "ASCEND", "NNODES", "NODE_RANK", "MASTER", "OMP")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment |= {"PYTHON": str(self.python), "RECORD": str(self.record), "HOME": str(self.home)}
        environment["PATH"] = f"{self.tools}:{os.environ['PATH']}"
        environment["BASH_FUNC_compgen%%"] = "() { return 1; }"  # the scripts see no device files, wherever this runs
        done = subprocess.run(
            ["bash", self.root / "launch" / script, *arguments],
            capture_output=True,
            text=True,
            cwd="/",  # any folder will do
            env={**environment, **variables},
            check=False,
        )
        return Ran(done.returncode, self.record.read_text().splitlines(), done.stderr, done.stdout)

    def environment(self) -> dict[str, str]:
        """The variables that the training got."""
        lines = Path(f"{self.record}.environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
