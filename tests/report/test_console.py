"""What a person sees: readable, complete, and without any power over the terminal."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.report.console import ConsoleReport, printable
from npu_vlrl.types import EpisodeStatus, Trajectory, Verdict
from tests.support.scripted import Verdicts, a_task, an_image, cut, play, workflow

LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
EVIL = "[bold red]x[/] \x1b[2J\x1b]0;title\x07 \u202e"


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@given(st.text(max_size=30))
@settings(max_examples=60)
def test_printable_text_has_no_control_characters_and_loses_nothing_else(text: str) -> None:
    safe = printable(text)
    assert all(c.isprintable() or c == "\n" for c in safe)
    assert "".join(c for c in text if c.isprintable()) == text or len(safe) > len(text) or "\n" in text
    assert printable("plain é 中 text\nand more") == "plain é 中 text\nand more"


def test_printable_by_hand() -> None:
    assert printable("a\x1b[2J\x07\r\tb\x9b\ud800\u202e") == "a\\x1b[2J\\x07\\r\\tb\\x9b\\ud800\\u202e"


def test_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    report = ConsoleReport(3)
    report.line(EVIL + " " + "long " * 100)
    out = shown(capsys)
    assert out.startswith("[bold red]x[/] \\x1b[2J\\x1b]0;title\\x07 \\u202e long long")
    assert out.count("\n") == 1  # never wrapped: a log file has whole lines


def test_steps_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleReport(10, log_every=2) as report:
        for step in (2, 3, 4):
            report.step(step, {"reward": 0.5, "seconds": 1.25, "unknown": 9.0}, episode())
    assert shown(capsys).rstrip() == "step 3 (4/10)  reward 0.5  seconds 1.25"


def test_a_run_does_not_end_with_the_pipe_that_shows_it() -> None:
    """Nor does Python complain at its end. Without the care that is taken it ends in silence."""
    code = """
import os, sys
from npu_vlrl.report.console import ConsoleReport
if sys.argv[1] == "careless":
    import npu_vlrl.report.console as console
    console._MayGoAway = lambda file: file
report = ConsoleReport(1)
for _ in range(3):
    report.line("x" * 100_000)
os.write(2, b"trained")
"""
    for care, expected in (("careful", (0, b"trained")), ("careless", (1, b""))):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-c", code, care]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
        os.close(write)
        assert (done.returncode, done.stderr) == expected


def test_letters_that_the_output_lacks_are_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    ConsoleReport(1).line("é 中")
    assert raw.getvalue() == b"\\xe9 \\u4e2d\n"


def episode() -> Trajectory:
    settings = {"tools": ("look",), "describe_tools": False, "max_turns": 4, "turn_tokens": 50}
    task = a_task(an_image(28), "Which [b]way[/b]?", hidden_image=an_image(56))
    judge = Verdicts([Verdict(0.1, False), Verdict(0.0, False, "Almost."), Verdict(1.0, True)])
    flow = workflow(judge, **settings)  # type: ignore[arg-type]
    return play(flow, [LOOK, EVIL, cut("lef"), "up"], task)


def test_a_trajectory_tells_who_said_what(capsys: pytest.CaptureFixture[str]) -> None:
    done = episode()
    ConsoleReport(1).trajectory(done)
    lines = shown(capsys).splitlines()
    assert lines[0] == "trajectory g/0: solved, right answer 'up'"
    assert lines[1] == "  user      | (images: 1) 'Which [b]way[/b]?'"
    assert lines[2] == f"  model     | {LOOK!r}   [end_of_turn, reward 0]"
    assert lines[3] == "  tool      | (images: 1) 'Image 1 is what you see.'"
    assert lines[4] == f"  model     | {EVIL!r}   [end_of_turn, reward 0.1]"
    assert lines[5] == "  feedback  | 'No. Try again.'"
    assert lines[6:9] == [
        "  model     | 'lef'   [turn_budget, reward 0]",
        "  feedback  | 'Almost.'",
        "  model     | 'up'   [end_of_turn, reward 1]",
    ]
    context = done.turns[-1].context
    counts = {kind: sum(len(s) for s in context if s.kind.value == kind) for kind in ("prompt", "observation")}
    actions = sum(len(turn.action) for turn in done.turns)
    assert lines[9] == f"  tokens    | prompt {counts['prompt']}, action {actions}, observation {counts['observation']}"
    assert len(lines) == 10


def test_long_texts_are_cut_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    task = a_task("w" * 301)
    ConsoleReport(1).trajectory(Trajectory(task, "g", 0, (), EpisodeStatus.FAILED, "no"))
    out = shown(capsys)
    assert "w" * 300 + "… (301 characters)" in out and "w" * 301 not in out
    assert "failed" in out and "prompt 0, action 0, observation 0" in out
    ConsoleReport(1).trajectory(dataclasses.replace(Trajectory(a_task("w" * 300), "g", 0, (), EpisodeStatus.FAILED)))
    assert "characters)" not in shown(capsys)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    report = ConsoleReport(1)
    shares = {"tasks": 12, "accuracy": 0.25, "after_retries": 0.5}
    report.evaluation("final, step 3", {"a[red]b\x1b[2J": shares, "all": shares})
    rows = shown(capsys).splitlines()
    assert "evaluation: final, step 3" in rows[0]
    assert ["a[red]b\\x1b[2J", "12", "0.250", "0.500"] in [
        [cell.strip() for cell in row.split("│")[1:-1]] for row in rows
    ]
    for failed, shown_in_title in ((0.0, False), (0.5, True)):
        report.evaluation("final", {"all": {"tasks": 12, "judge_failed": failed}})
        assert ("judge_failed" in shown(capsys)) is shown_in_title
    report.summary({"baseline": {"accuracy": 0.25}, "final": {"accuracy": 1.0}}, Path("x"))
    out = shown(capsys)
    assert ["accuracy", "0.250", "1.000"] in [[c.strip() for c in row.split("│")[1:-1]] for row in out.splitlines()]
    assert out.splitlines()[-1] == f"run folder: {Path('x').resolve()}"
    report.summary({}, Path("x"))
