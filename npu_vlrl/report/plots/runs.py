"""Reads run folders as numbers to draw, and groups runs that differ in nothing but the seed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from yaml import YAMLError

from npu_vlrl.config import ConfigError, load_config
from npu_vlrl.config.yaml_text import read_yaml
from npu_vlrl.report.lines import read_lines

SEED = "train.seed"
_MAX_DIFFERENCES = 3
"""Maximum number of keys in a group's name; runs that differ in more are named by their folders."""

Points = dict[int, float]
"""Values by step; steps without a value are absent."""


@dataclass(frozen=True)
class RecordedRun:
    """A run that was read: `read_run(Path("runs/arrow_tiny")).points("reward")` is `{0: 0.31, 1: 0.33}`."""

    folder: Path
    config: dict[str, Any]
    """Value of each key, by its dotted name, `run.*` left out."""
    lines: tuple[dict[str, Any], ...]
    """Lines of `metrics.jsonl`: a step or an evaluation each."""

    def points(self, metric: str) -> Points:
        """Recorded values of a metric; a repeated step has its later value."""
        values = ((line.get("step"), line.get(metric)) for line in self.lines)
        return {step: float(value) for step, value in values if _is_step(step) and _is_finite(value)}


@dataclass(frozen=True)
class Group:
    """Runs that form one line."""

    name: str
    """Differences from the other groups; empty where there is one only."""
    runs: tuple[RecordedRun, ...]


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder. Raises ConfigError for a path that is none."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: is no run folder: it has no config.yaml; name the folder that a training wrote")
    return RecordedRun(folder, _flat_config(folder / "config.yaml"), tuple(read_lines(folder / "metrics.jsonl")))


def group_runs(runs: Sequence[RecordedRun]) -> list[Group]:
    """Groups runs in the order of their first run, named by the differences between groups."""
    found: dict[str, list[RecordedRun]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key != SEED}
        found.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    groups = list(found.values())
    return [Group(name, tuple(members)) for name, members in zip(_differences(groups), groups, strict=True)]


def common_curve(points: Sequence[Points]) -> tuple[np.ndarray, np.ndarray]:
    """Steps [S] that any of the runs has, and their values [runs, S].

    A run without a value at a step has NaN there.
    """
    steps = np.array(sorted(set().union(*points)), dtype=int)
    values = [[own.get(int(step), math.nan) for step in steps] for own in points]
    return steps, np.array(values, dtype=float).reshape(len(points), len(steps))


def _differences(groups: Sequence[Sequence[RecordedRun]]) -> list[str]:
    if len(groups) == 1:
        return [""]
    configs = [members[0].config for members in groups]
    keys = sorted(set().union(*configs) - {SEED})
    differing = [key for key in keys if len({json.dumps(c.get(key), default=str) for c in configs}) > 1]
    folders = [members[0].folder.name for members in groups]
    if len(differing) > _MAX_DIFFERENCES:
        return folders if len(set(folders)) == len(folders) else [str(members[0].folder) for members in groups]
    leaves = [key.rpartition(".")[2] for key in differing]
    short = [leaf if leaves.count(leaf) == 1 else key for leaf, key in zip(leaves, differing, strict=True)]
    return [", ".join(f"{s}={_shown(c.get(k))}" for s, k in zip(short, differing, strict=True)) for c in configs]


def _flat_config(file: Path) -> dict[str, Any]:
    """Configuration by dotted key, with today's defaults for missing keys; unchanged where it no longer loads."""
    values: Any
    try:
        values = load_config(file).model_dump(mode="json")
    except ConfigError:
        try:
            values = read_yaml(file.read_text(encoding="utf-8"))
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: is no configuration; name the folder that a training wrote")
    values.pop("run", None)
    return dict(_flattened(values, ""))


def _flattened(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and abs(value) < 2**53


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # integers of JSON know no limit


def _shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
