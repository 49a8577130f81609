"""What a person sees while a run goes on: a progress bar in a terminal, plain lines in a log file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from npu_vlrl.types import SegmentKind, Trajectory

SHOWN = ("reward", "first_try_accuracy", "solved", "turns", "entropy", "kl", "logprob_gap", "update/mfu", "seconds")


class ConsoleReport:
    """Progress and trajectories on standard output."""

    def __init__(self, steps: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._steps = steps
        self._task = self.progress.add_task("training", total=steps, note="")

    def __enter__(self) -> ConsoleReport:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def line(self, text: str) -> None:
        """Plain text: markup in it has no effect, and control characters are spelt out."""
        self.console.print(Text(printable(text)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        notes = [f"{name} {metrics[name]:.3g}" for name in SHOWN if name in metrics]
        self.progress.update(self._task, completed=step, note="  ".join(notes[:2]))  # a bar must fit on one line
        if not self.console.is_terminal:
            self.line(f"step {step}/{self._steps}  " + "  ".join(notes))

    def trajectory(self, trajectory: Trajectory) -> None:
        """One episode, readable: who said what, and what it earned."""
        answer = trajectory.task.answer
        right = "" if answer is None else f", right answer {answer!r}"
        lines = [f"trajectory {trajectory.id}: {trajectory.status.value}{right}"]
        lines += [f"  {m.role:9} | {_shown(m.text, len(m.images))}" for m in trajectory.task.messages]
        for turn in trajectory.turns:
            stop = turn.action.stop_reason
            terms = turn.verdict.terms.items() if turn.verdict else ()
            earned = f"[{stop and stop.value}, reward {turn.action.reward:g}"
            earned += "".join(f", {name} {value:g}" for name, value in terms) + "]"
            if turn.state is not None:
                lines.append(f"  {'state':9} | {_shown(turn.state)}")
            lines.append(f"  {'model':9} | {_shown(turn.text)}   {earned}")
            lines += [f"  {'tool':9} | {_shown(r.text, len(r.images))}" for r in turn.tool_results]
            if turn is not trajectory.turns[-1] and turn.verdict is not None and turn.feedback:
                lines.append(f"  {'feedback':9} | {_shown(turn.feedback)}")
        tokens = dict.fromkeys(SegmentKind, 0)
        for segment in (*trajectory.turns[-1].context, trajectory.turns[-1].action) if trajectory.turns else ():
            tokens[segment.kind] += len(segment)
        lines.append("  tokens    | " + ", ".join(f"{kind.value} {count}" for kind, count in tokens.items()))
        self.line("\n".join(lines))

    def summary(self, evaluations: Mapping[str, Mapping[str, float]], folder: Path) -> None:
        """What the run achieved, and where everything is."""
        table = Table(title="before and after")
        names = list(evaluations)
        for column in ("", *names):
            table.add_column(column, justify="right")
        for key in next(iter(evaluations.values()), {}):
            table.add_row(key, *(f"{evaluations[name][key]:.3f}" for name in names))
        self.console.print(table)
        self.line(f"run folder: {folder.resolve()}")

    def evaluation(self, name: str, results: Mapping[str, Mapping[str, float]]) -> None:
        """One row for each data source, and one for all of them."""
        table = Table(title=f"evaluation: {name}")
        columns = list(results["all"])
        for column in ("data source", *columns):
            table.add_column(column, justify="left" if column == "data source" else "right")
        for source, values in results.items():
            cells = [f"{values[c]:.0f}" if c == "tasks" else f"{values[c]:.3f}" for c in columns]
            table.add_row(Text(printable(source)), *cells)
        self.console.print(table)


def printable(text: str) -> str:
    """`text` with everything but printable characters and newlines escaped: names and messages may come from data, and
    a control character would act on the terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _shown(text: str, images: int = 0, limit: int = 300) -> str:
    cut = text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
    return f"{f'(images: {images}) ' if images else ''}{cut!r}"
