"""Compares two finished evaluations of the same tasks, sample by sample, and collects the trajectories that changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from npu_vlrl.config import ConfigError
from npu_vlrl.report.evaluated import KINDS, read
from npu_vlrl.report.record_schema import read_record
from npu_vlrl.report.results import TaskResult, divided
from npu_vlrl.report.statistics import bootstrap_intervals, mcnemar_exact

FILE = "comparison.json"

MEASURES = ("after_retries", "accuracy")

Pair = tuple[TaskResult, TaskResult]


def compare(first: Path, second: Path, out: Path) -> dict[str, Any]:
    """Compares the evaluation in the folder `first` with that in `second`, and makes `out` a run folder for the viewer.

    `out` holds `comparison.json`, which is returned; the configuration of `first`; and both evaluations' trajectories
    of each task whose answers are right more or less often: in a group, `won/NUMBER/TASK` or `lost/…`, each with a
    `label`.

    Raises ConfigError when one is not finished, when they differ in tasks or answers to each, or when `out` holds
    anything other than a comparison.
    """
    if out.exists() and not (out / FILE).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and holds no comparison; choose another folder with --out")
    (settings, ones), (other_settings, others) = read(first), read(second)
    pairs = _pairs(first, second, ones, others)
    labels = _labels(first, second)
    changed = changes(pairs)
    values = {
        "labels": list(labels),
        "folders": [str(first), str(second)],
        "settings": [settings["settings"], other_settings["settings"]],
        "results": results(pairs, settings["settings"]["seed"]),
        "changed": [{"task": pairs[index][0].task, "change": word} for index, word in changed.items()],
    }
    records = list(_changed_records(pairs, (first, second), labels, changed))
    (out / "images").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(first / "config.yaml", out / "config.yaml")
    with (out / "trajectories.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            for folder in (first, second):
                _copy_images(record, folder / "images", out / "images")
    (out / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return values


def results(pairs: Sequence[Pair], seed: int) -> dict[str, Any]:
    """Compares the first evaluation with the second, over `all` tasks and over those of each name of each kind."""
    found: dict[str, Any] = {"all": _result(pairs, seed)}
    for kind, name_of in KINDS.items():
        names = divided(pairs, partial(_name, name_of))
        found[kind] = {name: _result(members, seed) for name, members in names.items()}
    return found


def _name(name_of: Callable[[TaskResult], str | None], pair: Pair) -> str | None:
    return name_of(pair[0])


def _result(pairs: Sequence[Pair], seed: int) -> dict[str, Any]:
    """Result of each measure: both means, the mean difference with a paired bootstrap interval over tasks, tasks that
    were won, lost and stayed the same, and the exact p of McNemar's test, which with several answers to each task is
    the sign test of won against lost ones.
    """
    rows = np.array([[[side.measures()[m] for m in MEASURES] for side in pair] for pair in pairs])
    differences = rows[:, 0] - rows[:, 1]
    intervals = bootstrap_intervals(differences, seed)
    found: dict[str, Any] = {"tasks": len(pairs)}
    for column, measure in enumerate(MEASURES):
        difference = differences[:, column]
        won, lost = int((difference > 0).sum()), int((difference < 0).sum())
        low, high = intervals[column].tolist()
        found[measure] = {
            "means": rows[:, :, column].mean(0).tolist(),
            "difference": {"mean": float(difference.mean()), "low": low, "high": high},
            "won": won,
            "lost": lost,
            "same": len(pairs) - won - lost,
            "p": mcnemar_exact(won, lost),
        }
    return found


def changes(pairs: Sequence[Pair]) -> dict[int, str]:
    """Changed tasks by number, `won` or `lost`: after retries, or in the first answer where that makes no
    difference.
    """
    found = {}
    for index, (one, other) in enumerate(pairs):
        mine, yours = one.measures(), other.measures()
        differences = [mine[measure] - yours[measure] for measure in MEASURES]
        if difference := next((d for d in differences if d), 0.0):
            found[index] = "won" if difference > 0 else "lost"
    return found


def _pairs(first: Path, second: Path, ones: Sequence[TaskResult], others: Sequence[TaskResult]) -> list[Pair]:
    for index, (one, other) in enumerate(zip(ones, others, strict=False)):
        if (one.task, one.fingerprint) != (other.task, other.fingerprint):
            how = "asks or judges otherwise" if one.task == other.task else f"is {other.task}"
            raise ConfigError(
                f"the tasks differ: task {index}, {one.task} in {first}, {how} in {second}; evaluate both with the "
                "same data and train.seed"
            )
        if len(one.answers) != len(other.answers):
            raise ConfigError(
                f"{first} has {len(one.answers)} answers to each task and {second} {len(other.answers)}; evaluate both "
                "with the same evaluation.answers"
            )
    if len(ones) != len(others):
        longer, more = (first, ones) if len(ones) > len(others) else (second, others)
        task = more[min(len(ones), len(others))].task
        raise ConfigError(f"the tasks differ: {task} is in {longer} only; evaluate both with the same evaluation.tasks")
    if not ones:
        raise ConfigError(f"{first} and {second} hold no task; there is nothing to compare")
    return list(zip(ones, others, strict=True))


def _labels(first: Path, second: Path) -> tuple[str, str]:
    """Names of both folders, or their paths where the names are equal."""
    names = first.resolve().name, second.resolve().name
    return names if names[0] != names[1] else (str(first), str(second))


def _changed_records(
    pairs: Sequence[Pair], folders: Sequence[Path], labels: Sequence[str], changed: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    """Yields the records of changed tasks, those of both folders for a task together."""
    found: dict[int, list[dict[str, Any]]] = {index: [] for index in changed}
    for side, (folder, label) in enumerate(zip(folders, labels, strict=True)):
        for index, record in _records(folder, [pair[side] for pair in pairs]):
            if index in found:
                group, member = f"{changed[index]}/{index}/{record['task']}", len(found[index])
                own = {"id": f"{group}/{member}", "group": group, "label": label}
                found[index].append({**record, **own})
    return (record for members in found.values() for record in members)


def _records(folder: Path, results: Sequence[TaskResult]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each trajectory with the number of its task, in the order of the tasks."""
    numbers = [index for index, result in enumerate(results) for _ in result.answers]
    try:
        with (folder / "trajectories.jsonl").open("rb") as lines:
            for index, line in zip(numbers, lines, strict=True):
                record = read_record(line)
                if record.get("task") != results[index].task:
                    raise ValueError(f"{record['id']} stands where {results[index].task} was answered")
                yield index, record
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}/trajectories.jsonl is not that of the evaluation ({error}); evaluate again"
        ) from error


def _copy_images(record: Mapping[str, Any], source: Path, target: Path) -> None:
    for name in _hashes(record):
        if (source / f"{name}.png").is_file() and not (target / f"{name}.png").exists():
            shutil.copyfile(source / f"{name}.png", target / f"{name}.png")


def _hashes(record: Mapping[str, Any]) -> Iterator[str]:
    for turn in record["turns"]:
        for segment in turn["new_context"]:
            yield from (image["hash"] for image in segment.get("images", ()))
        for result in turn.get("tool_results", ()):
            yield from result.get("images", ())
