"""Evaluations and comparisons as tables for the screen: percent, with 95 % intervals in brackets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from npu_vlrl.report.comparison import MEASURES
from npu_vlrl.report.console import printable


def evaluation(values: Mapping[str, Any]) -> list[Table]:
    """Table of one row for each kind of task, from the values of `evaluation.json`; and official scores."""
    most = [key for key in values["results"]["all"] if key.startswith("pass@")][-1:]
    table = _table(
        f"evaluation, answers to each task: {values['settings']['answers']}",
        ["tasks", "accuracy", "after_retries", *most, "turns"],
    )
    for name, found in _rows(values["results"]):
        cells = [str(found["tasks"])]
        if found["tasks"]:
            cells += [_interval(found[key]) for key in ("accuracy", "after_retries")]
            cells += [_percent(found[key]["mean"]) for key in most] + [f"{found['turns']['mean']:.2f}"]
        table.add_row(name, *cells)
    return [table, *([_scores(values["benchmarks"])] if values["benchmarks"] else [])]


def comparison(values: Mapping[str, Any]) -> list[Table]:
    """Table of one row for each measure and kind of task, from the values of `comparison.json`."""
    found = []
    for measure in MEASURES:
        title = f"{measure}: {values['labels'][0]} against {values['labels'][1]}"
        table = _table(title, ["first", "second", "difference", "won", "lost", "same", "p"])
        for name, result in _rows(values["results"]):
            one = result[measure]
            counts = [str(one[word]) for word in ("won", "lost", "same")]
            table.add_row(name, *map(_percent, one["means"]), _interval(one["difference"]), *counts, f"{one['p']:.3f}")
        found.append(table)
    return found


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(printable(title)), box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _scores(benchmarks: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table("benchmarks' own scores, from the first answer", ["score"])
    for benchmark, scores in benchmarks.items():
        for name, value in scores.items():
            table.add_row(Text(printable(f"{benchmark}: {name}")), f"{value:.2f}")
    return table


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[Text, Mapping[str, Any]]]:
    """Rows of all tasks, and of the names of each kind that has more than one: a single one equals all tasks."""
    yield Text("all"), results["all"]
    for kind, names in results.items():
        if kind != "all" and len(names) > 1:
            yield from ((Text(printable(f"{kind.replace('_', ' ')} {name}")), found) for name, found in names.items())


def _interval(value: Mapping[str, float]) -> str:
    return f"{_percent(value['mean'])} [{_percent(value['low'])} {_percent(value['high'])}]"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
