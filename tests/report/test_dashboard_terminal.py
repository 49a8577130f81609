"""The dashboard in real terminals: large, small, without colours, of another size in the middle, and dumb."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.terminal import Shown, in_terminal

ROOT = Path(__file__).parents[2]

CODE = """
import time
from npu_vlrl.report.console import ConsoleReport
from npu_vlrl.types import EpisodeStatus, Message, Task, Trajectory
task = Task("t", (Message("user", ("Which?",)),), "up", "made")
trajectory = Trajectory(task, "g", 0, (), EpisodeStatus.STOPPED)
metrics = {"reward": 0.5, "first_try_accuracy": 0.25, "solved": 0.5, "turns": 2.0, "seconds": 0.1}
metrics["rollout_seconds"] = 0.05
with ConsoleReport(4) as report:
    report.line("a platform")
    for step in range(4):
        report.step(step, metrics, trajectory)
        if step == 1:
            report.trouble("step 1: RESIZE " + "long " * 40)
        time.sleep(0.4)  # two drawings a second
    report.line("after all")
"""


def shown(columns: int, rows: int, then: tuple[int, int] | None = None, **environment: str) -> Shown:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    usual = {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
    return in_terminal(CODE, columns, rows, kept | usual | environment, then)


def test_the_dashboard_stays_below_the_lines_of_the_run() -> None:
    found = shown(120, 40)
    assert found.code == 0 and found.cursor
    words = [line.split()[0] for line in found.screen]
    assert words == [
        "a",
        "step",
        "after",
        "training",
        "reward",
        "accuracy",
        "solved",
        "episodes",
        "a",
        "an",
        "troubles",
    ]
    assert (
        "4/4" in found.screen[3]
        and found.screen[-2] == "an episode  stopped after 0 turns, reward 0, right answer 'up'"
    )
    assert "\x1b[36m" in found.written  # colours
    assert {f"{done}/4" in found.written for done in (0, 4)} == {True}
    assert found.written.count("training") > 2  # it was drawn in between


@pytest.mark.parametrize(("columns", "rows"), [(40, 8), (12, 3), (1, 1)])
def test_small_terminals_show_what_fits(columns: int, rows: int) -> None:
    found = shown(columns, rows)
    assert found.code == 0 and found.cursor and "Traceback" not in found.written
    own = [line for line in found.screen if not line.startswith(("a platform", "step 1", "after all"))]
    assert own and all(len(line) <= columns for line in own)


def test_a_terminal_that_changes_its_size() -> None:
    found = shown(120, 40, then=(30, 10))
    assert found.code == 0 and "Traceback" not in found.written
    assert found.screen[-1] == "troubles    1, the last: step…"
    assert "\x1b[0mstopped after 0 turns, reward 0, right answer" in found.written  # as long as there was room


def test_without_colours() -> None:
    found = shown(120, 40, NO_COLOR="1")
    assert found.code == 0 and "\x1b[36m" not in found.written and "4/4" in found.screen[3]


def test_a_dumb_terminal_gets_lines() -> None:
    found = shown(120, 40, TERM="dumb")
    assert found.code == 0 and "\x1b" not in found.written
    assert [line.split("  ")[0] for line in found.screen if line.startswith("step ")] == [
        *("step 0 (1/4)", "step 1 (2/4)"),
        "step 1: RESIZE " + ("long " * 40).strip(),
        *("step 2 (3/4)", "step 3 (4/4)"),
    ]


def test_ascii_letters_where_the_terminal_has_no_others() -> None:
    found = shown(120, 40, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert found.code == 0 and found.written.isascii()
    assert found.screen[3].endswith("########################")


def test_the_terminal_of_the_tests_shows_what_is_written() -> None:
    found = in_terminal("print('ab\\ncd'); print('\\x1b[1A\\x1b[2Kef', end='\\r'); print('g'); 1 / 0", 80, 24, {})
    assert found.screen[:2] == ["ab", "gf"] and found.code == 1 and "ZeroDivisionError" in found.screen[-1]
    assert sys.executable
