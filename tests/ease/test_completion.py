"""Completion in real shells: what is typed, with a tab, arrives as the whole word."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.program import program
from tests.support.ranks import PATIENCE_S


def typed(folder: Path, line: str) -> str:
    """What `npu-vlrl` is called with when a line is typed in an interactive bash; \\t is the tab key."""
    (folder / "completion").write_text(program("completion", "bash").out)
    (folder / "rc").write_text("npu-vlrl() { printf '<%s>' \"$@\" >called; }\nPS1=ready;\n. ./completion\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvp("bash", ["bash", "--rcfile", "rc", "-i"])
    os.write(terminal, f"{line}\nexit\n".encode())
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and select.select([terminal], [], [], PATIENCE_S)[0]:
        try:
            if not os.read(terminal, 4096):
                break
        except OSError:  # the shell has ended
            break
    os.waitpid(pid, 0)
    os.close(terminal)
    return (folder / "called").read_text()


@pytest.mark.parametrize(
    ("line", "called"),
    [
        ("npu-vlrl estim\t --devices 2", "<estimate><--devices><2>"),
        ("npu-vlrl train --conf\tx.yaml train.sta\t3", "<train><--config><x.yaml><train.staleness=3>"),
        ("npu-vlrl eval model.lora.ra\t8", "<eval><model.lora.rank=8>"),
        ("npu-vlrl train --config some\t", "<train><--config><something.yaml>"),
        ("npu-vlrl data rot\t --photos so\t", "<data><rotation><--photos><somewhere/>"),
        ("npu-vlrl completion z\t", "<completion><zsh>"),
    ],
)
def test_bash_completes(line: str, called: str, tmp_path: Path) -> None:
    (tmp_path / "something.yaml").touch()
    if "--photos" in line:
        (tmp_path / "something.yaml").unlink()
        (tmp_path / "somewhere").mkdir()
    assert typed(tmp_path, line) == called


def test_zsh_reads_its_script(tmp_path: Path) -> None:
    made = program("completion", "zsh")
    assert made.code == 0 and made.out.startswith("#compdef npu-vlrl") and "train.staleness=" in made.out
    (tmp_path / "_npu-vlrl").write_text(made.out)
    if shutil.which("zsh") is None:  # a machine need not have it
        return
    script = f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -d ./dump; print ${{_comps[npu-vlrl]}}"
    done = subprocess.run(["zsh", "-fc", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "_npu-vlrl"
    subprocess.run(["zsh", "-n", "_npu-vlrl"], cwd=tmp_path, check=True)
