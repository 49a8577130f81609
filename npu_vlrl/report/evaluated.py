"""Result of an evaluation: means with intervals by kind of task, and `evaluation.json`."""

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
"""Groupings of the tasks; None leaves a task out."""


def means(results: Sequence[TaskResult]) -> dict[str, float]:
    """Means over the tasks that have a measure, and the number of tasks; without tasks, the number alone."""
    return {"tasks": len(results)} | {key: sum(values) / len(values) for key, values in _by_measure(results).items()}


def _by_measure(results: Sequence[TaskResult]) -> dict[str, list[float]]:
    rows = [result.measures() for result in results]
    return {key: [row[key] for row in rows if key in row] for key in dict.fromkeys(key for row in rows for key in row)}


def means_by_source(results: Sequence[TaskResult]) -> dict[str, dict[str, float]]:
    """Means by data source, and over all tasks under `all`."""
    sources = divided(results, KINDS["data_source"]) | {"all": list(results)}
    return {source: means(members) for source, members in sources.items()}


def with_intervals(results: Sequence[TaskResult], seed: int) -> dict[str, Any]:
    """Means with 95 % intervals by a bootstrap over tasks: `{"tasks": n, measure: {"mean", "low", "high"}, …}`."""
    found: dict[str, Any] = {"tasks": len(results)}
    for key, values in _by_measure(results).items():
        ((low, high),) = bootstrap_intervals(np.array(values)[:, None], seed).tolist()
        found[key] = {"mean": float(np.mean(values)), "low": low, "high": high}
    return found


def summary(results: Sequence[TaskResult], seed: int) -> dict[str, Any]:
    """Means with intervals over `all` tasks, and over those of each name of each of `KINDS`."""
    found: dict[str, Any] = {"all": with_intervals(results, seed)}
    for kind, name_of in KINDS.items():
        names = divided(results, name_of)
        found[kind] = {name: with_intervals(members, seed) for name, members in names.items()}
    return found


def write(
    folder: Path, settings: Mapping[str, Any], skipped: Sequence[str], results: Sequence[TaskResult]
) -> dict[str, Any]:
    """Writes `evaluation.json`, and returns its content. It holds no time: the same evaluation gives the same bytes."""
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
    """Reads `evaluation.json`, and its tasks. Raises ConfigError when the folder holds no finished evaluation."""
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
