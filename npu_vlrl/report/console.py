"""Console output of a run: a dashboard at the bottom of a terminal, plain lines in a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from npu_vlrl.report.dashboard import Dashboard
from npu_vlrl.report.verdicts import labelled_terms
from npu_vlrl.types import SegmentKind, Trajectory

SHOWN = ("reward", "first_try_accuracy", "solved", "turns", "entropy", "kl", "logprob_gap", "update/mfu", "seconds")


class ConsoleReport:
    """Progress and trajectories on standard output."""

    def __init__(self, steps: int, log_every: int = 1) -> None:
        self.console = Console(file=cast(IO[str], _MayGoAway(sys.stdout)), highlight=False, soft_wrap=True)
        self._steps, self._log_every = steps, log_every
        self._dashboard = Dashboard(steps)
        self._live: Live | None = None
        if steps and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(self._dashboard, console=self.console, refresh_per_second=2, vertical_overflow="crop")

    def __enter__(self) -> ConsoleReport:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """Prints plain text: markup in it has no effect, and control characters are escaped."""
        self.console.print(Text(printable(text)))

    def trouble(self, text: str) -> None:
        """Prints a warning that a person should see; the run continues."""
        self._dashboard.trouble(printable(text).replace("\n", " "))
        self.line(text)

    def step(self, step: int, metrics: Mapping[str, float], trajectory: Trajectory | None = None) -> None:
        """Reports a finished step, numbered from 0 as in all records; `trajectory` is one of that step, if any."""
        done = step + 1
        self._dashboard.step(step, metrics, trajectory)
        if self._live is None and done % self._log_every == 0:
            notes = [f"{name} {metrics[name]:.3g}" for name in SHOWN if name in metrics]
            self.line(f"step {step} ({done}/{self._steps})  " + "  ".join(notes))

    def trajectory(self, trajectory: Trajectory) -> None:
        """Prints one episode for people: roles, texts and rewards."""
        answer = trajectory.task.answer
        right = "" if answer is None else f", right answer {answer!r}"
        lines = [f"trajectory {trajectory.id}: {trajectory.status.value}{right}"]
        lines += [f"  {m.role:9} | {_shown(m.text, len(m.images))}" for m in trajectory.task.messages]
        for turn in trajectory.turns:
            stop = turn.action.stop_reason
            terms = labelled_terms(turn.verdict).items() if turn.verdict else ()
            earned = f"[{stop and stop.value}, reward {turn.action.reward:g}"
            earned += "".join(f", {name} {value:g}" for name, value in terms) + "]"
            if turn.state is not None:
                lines.append(f"  {'state':9} | {_shown(turn.state)}")
            lines.append(f"  {'model':9} | {_shown(turn.text)}   {earned}")
            lines += [f"  {'tool':9} | {_shown(r.text, len(r.images))}" for r in turn.tool_results]
            if turn.verdict is not None and turn.feedback:
                lines.append(f"  {'feedback':9} | {_shown(turn.feedback)}")
        tokens = dict.fromkeys(SegmentKind, 0)
        for segment in (*trajectory.turns[-1].context, trajectory.turns[-1].action) if trajectory.turns else ():
            tokens[segment.kind] += len(segment)
        lines.append("  tokens    | " + ", ".join(f"{kind.value} {count}" for kind, count in tokens.items()))
        self.line("\n".join(lines))

    def summary(self, evaluations: Mapping[str, Mapping[str, float]], folder: Path) -> None:
        """Prints the results of the run, and the paths of its files."""
        table = Table(title="before and after")
        names = list(evaluations)
        for column in ("", *names):
            table.add_column(column, justify="right")
        for key in dict.fromkeys(key for values in evaluations.values() for key in values):
            found = [evaluations[name].get(key) for name in names]
            table.add_row(key, *("" if value is None else f"{value:.3f}" for value in found))
        self.console.print(table)
        self.line(f"run folder: {folder.resolve()}")

    def evaluation(self, name: str, results: Mapping[str, Mapping[str, float]]) -> None:
        """Prints one row for each data source, and one for all of them."""
        self._dashboard.evaluation(name, results["all"])
        table = Table(title=f"evaluation: {name}")
        # a table of 80 columns has no room for what is mostly 0
        columns = [key for key, value in results["all"].items() if key != "judge_failed" or value]
        for column in ("data source", *columns):
            table.add_column(column, justify="left" if column == "data source" else "right")
        for source, values in results.items():
            cells = [f"{values[c]:.{0 if c == 'tasks' else 3}f}" if c in values else "" for c in columns]
            table.add_row(Text(printable(source)), *cells)
        self.console.print(table)


class _MayGoAway:
    """Standard output that may disappear: a run does not end with the terminal or the pipe that shows it.

    Characters that its encoding lacks are escaped.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.isatty, self.fileno = file.isatty, file.fileno
        self.encoding = file.encoding

    def write(self, text: str) -> int:
        if self.encoding is not None:  # None for a file in memory, which takes everything
            text = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        try:
            return self._file.write(text)
        except OSError:
            return self._go_away()

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._go_away()

    def _go_away(self) -> int:
        """Redirects pending output to the null device; Python would fail on it at its exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
        return 0


def printable(text: str) -> str:
    """Escapes everything but printable characters and newlines in `text`: names and messages may come from data, and a
    control character would act on the terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _shown(text: str, images: int = 0, limit: int = 300) -> str:
    cut = text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
    return f"{f'(images: {images}) ' if images else ''}{cut!r}"
