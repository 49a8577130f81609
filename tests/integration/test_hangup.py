"""A terminal that closes ends a training as Ctrl-C does; under nohup it does not."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

from npu_vlrl.learner.checkpoint import latest
from tests.support.ranks import PATIENCE_S, ROOT
from tests.support.runs import lines, write_config

WAITS = """
import signal, sys, time
from npu_vlrl.network.interrupt import CtrlC
ctrl_c = CtrlC()
with ctrl_c.caught():
    print("ready", flush=True)
    end = time.monotonic() + float(sys.argv[1])
    while not ctrl_c.asked and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(float(sys.argv[2]))
print(ctrl_c.asked, flush=True)
"""


def waits(seconds: float, more: float, ignores: bool, signals: list[tuple[float, int]]) -> tuple[int, str]:
    """Exit code and output of a process that gets each signal after so many seconds."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)  # as nohup starts it
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", WAITS, str(seconds), str(more)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for after, number in signals:
        time.sleep(after)
        process.send_signal(number)
    return process.wait(PATIENCE_S), process.stdout.read()


def test_it_is_ignored_where_it_was_ignored_from_the_start() -> None:
    assert waits(1, 0, True, [(0, signal.SIGHUP)]) == (0, "False\n")


def test_it_may_come_again_and_ends_nothing_at_once() -> None:
    assert waits(PATIENCE_S, 2.5, False, [(0, signal.SIGHUP), (1.2, signal.SIGHUP)]) == (0, "True\n")
    assert waits(PATIENCE_S, PATIENCE_S, False, [(0, signal.SIGHUP), (1.2, signal.SIGINT)])[0] == -signal.SIGINT


def test_a_training_whose_terminal_closes_writes_a_checkpoint(tmp_path: Path) -> None:
    """Also where none was asked for, and where what it says can be written nowhere any more."""
    run = tmp_path / "run"
    words = ["--config", str(write_config(tmp_path)), f"run.dir={run}", "run.checkpoint_every=0", "train.steps=1000"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "npu_vlrl", "train", *words, "warm_start.steps=0"])
    limit, steps = time.monotonic() + PATIENCE_S, run / "metrics.jsonl"
    while time.monotonic() < limit and (not steps.is_file() or steps.read_text().count("grad_norm") < 2):
        os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    newest, done = latest(run / "checkpoints"), [line for line in lines(run, "metrics.jsonl") if "grad_norm" in line]
    assert newest is not None and newest.name == f"step-{len(done):08d}" and len(done) >= 2
