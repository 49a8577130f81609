"""The rotation task: which angles were said, and how they lie to the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from npu_vlrl.report.plots.curves import color_of
from npu_vlrl.report.plots.runs import Group, read_lines
from npu_vlrl.report.plots.style import BELOW, COLUMN, GREY
from npu_vlrl.workflow.rewards.angle import read_angle
from npu_vlrl.workflow.rewards.tagged import last_tag

DATA_SOURCE = "rotation"
BIN = 15
"""Degrees of a bin."""
EDGES = np.arange(0, 361, BIN)


@dataclass(frozen=True)
class Angles:
    """Of a group's episodes that ended with an angle, in degrees from 0 to below 360, arrays [episodes]."""

    step: np.ndarray
    right: np.ndarray
    said: np.ndarray
    without: int
    """Episodes whose last turn held no angle."""


def read_angles(folders: Sequence[Path]) -> Angles:
    """Of the recorded episodes of training; of evaluations where nothing else was recorded."""
    trained: list[tuple[int, float, float | None]] = []
    evaluated: list[tuple[int, float, float | None]] = []
    for folder in folders:
        for record in read_lines(folder / "trajectories.jsonl"):
            right = read_angle(record["answer"] or "") if record.get("data_source") == DATA_SOURCE else None
            if right is None or not record["turns"]:
                continue
            content = last_tag(record["turns"][-1]["text"])
            said = None if content is None else read_angle(content)
            kind = trained if record["group"].startswith("step") else evaluated
            kind.append((record["step"], right % 360, None if said is None else said % 360))
    episodes = trained or evaluated
    told = np.array([(step, right, said) for step, right, said in episodes if said is not None]).reshape(-1, 3)
    return Angles(told[:, 0], told[:, 1], told[:, 2], len(episodes) - len(told))


def draw_angles(groups: Sequence[Group]) -> Figure | None:
    """A row for each group: said against right angles, and how often each was said. None where nobody said any."""
    found = [(group, read_angles([run.folder for run in group.runs])) for group in groups]
    found = [(group, angles) for group, angles in found if len(angles.said)]
    if not found:
        return None
    figure = Figure((COLUMN, 1.75 * len(found) + 0.2), layout="constrained")
    rows = figure.subplots(len(found), 2, squeeze=False)
    for (group, angles), (left, right) in zip(found, rows, strict=True):
        _draw_pairs(left, angles)
        _draw_shares(right, angles)
        if len(found) > 1:
            left.set_title(group.name, fontsize=7)
    figure.legend(*rows[0][1].get_legend_handles_labels(), **BELOW, ncols=3)
    return figure


def later_half(angles: Angles) -> np.ndarray:
    """bool [episodes]: those of the second half of the recorded steps; all where there is one step only."""
    first, last = angles.step.min(), angles.step.max()
    return angles.step >= (first + last) / 2


def shares(degrees: np.ndarray) -> np.ndarray:
    """[bins] of `BIN` degrees each: the share of the angles that lies in it."""
    return np.histogram(degrees, EDGES)[0] / max(1, len(degrees))


def _draw_pairs(axes: Axes, angles: Angles) -> None:
    """The second half: on the diagonal the model is right; the corners beside it are near, too, since 0 is 360."""
    late = later_half(angles)
    counts = np.histogram2d(angles.right[late], angles.said[late], (EDGES, EDGES))[0]
    axes.grid(False)
    axes.pcolormesh(
        EDGES, EDGES, np.ma.masked_equal(counts.T, 0), cmap="Blues", vmin=-counts.max() / 3, rasterized=True
    )
    axes.plot([0, 360], [0, 360], color=GREY, linewidth=0.5, dashes=(3, 3))
    axes.set(xlabel="right angle (°)", ylabel="predicted angle (°)", aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(90))


def _draw_shares(axes: Axes, angles: Angles) -> None:
    late = later_half(angles)
    kinds = [("right", angles.right, GREY, "--")]
    if not late.all():
        kinds.append(("said, first half", angles.said[~late], color_of(5), "-"))
    kinds.append(("said, second half", angles.said[late], color_of(0), "-"))
    for label, degrees, color, dashes in kinds:
        axes.stairs(shares(degrees), EDGES, label=label, color=color, linewidth=1.1, linestyle=dashes, baseline=None)
    axes.set(xlabel="angle (°)", ylabel="share of answers", xlim=(0, 360), ylim=(0, None))
    axes.xaxis.set_major_locator(MultipleLocator(90))
