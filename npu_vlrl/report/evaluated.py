"""What an evaluation found: means with intervals by kind of task, and `evaluation.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_vlrl.config import ConfigError
from npu_vlrl.report.benchmark_scores import official_scores
from npu_vlrl.report.results import Answer, TaskResult, divided
from npu_vlrl.report.statistics import bootstrap_intervals

FILE = "evaluation.json"

KINDS: dict[str, Callable[[TaskResult], str | None]] = {
    "data_source": lambda result: result.data_source,
    "category": lambda result: result.category,
    "image_type": lambda result: result.image_type,
    "image_size": lambda result: result.image_size,
}
"""Ways to divide the tasks; None leaves a task out."""


def means(results: Sequence[TaskResult]) -> dict[str, float]:
    """Means over tasks, and their number; of none, the number alone."""
    rows = _rows(results)
    return {"tasks": len(rows)} | {key: sum(row[key] for row in rows) / len(rows) for key in (rows[0] if rows else ())}


def _rows(results: Sequence[TaskResult]) -> list[dict[str, float]]:
    """The measures of each task. Where one has `judge_disagreement`, it is 0 for those that no checker judged, as
    `judge_failed` is.
    """
    rows = [result.measures() for result in results]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, 0.0) for name in names} for row in rows]


def means_by_source(results: Sequence[TaskResult]) -> dict[str, dict[str, float]]:
    """Means by data source, and of all tasks under `all`."""
    sources = divided(results, KINDS["data_source"]) | {"all": list(results)}
    return {source: means(members) for source, members in sources.items()}


def with_intervals(results: Sequence[TaskResult], seed: int) -> dict[str, Any]:
    """`{"tasks": n, measure: {"mean", "low", "high"}, …}` with 95 % intervals, by a bootstrap over tasks."""
    rows = _rows(results)
    if not rows:
        return {"tasks": 0}
    columns = list(rows[0])
    values = np.array([[row[key] for key in columns] for row in rows])
    intervals = bootstrap_intervals(values, seed)
    found = {
        key: {"mean": float(mean), "low": float(low), "high": float(high)}
        for key, mean, (low, high) in zip(columns, values.mean(0), intervals, strict=True)
    }
    return {"tasks": len(rows), **found}


def summary(results: Sequence[TaskResult], seed: int) -> dict[str, Any]:
    """Means with intervals of `all` tasks, and of those of each name of each of `KINDS`."""
    found: dict[str, Any] = {"all": with_intervals(results, seed)}
    for kind, name_of in KINDS.items():
        names = divided(results, name_of)
        found[kind] = {name: with_intervals(members, seed) for name, members in names.items()}
    return found


def write(
    folder: Path, settings: Mapping[str, Any], skipped: Sequence[str], results: Sequence[TaskResult]
) -> dict[str, Any]:
    """Writes `evaluation.json`, and returns it. It holds no clock: the same evaluation gives the same bytes."""
    values = {
        "settings": settings,
        "skipped": list(skipped),
        "results": summary(results, settings["seed"]),
        "benchmarks": official_scores(results),
        "tasks": [dataclasses.asdict(result) for result in results],
    }
    (folder / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return values


def read(folder: Path) -> tuple[dict[str, Any], list[TaskResult]]:
    """All of `evaluation.json`, and its tasks. Raises ConfigError when the folder holds no finished evaluation."""
    try:
        values = json.loads((folder / FILE).read_bytes())
        tasks = [TaskResult(**{**t, "answers": tuple(Answer(**a) for a in t["answers"])}) for t in values["tasks"]]
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no finished evaluation ({FILE}); run or resume `npu-vlrl eval --run-dir {folder}` first"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read ({error!r}); evaluate again") from error
    return values, tasks
