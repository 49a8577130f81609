"""Figures of the rotation task: predicted against right angles, and their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from npu_vlrl.report.lines import read_lines
from npu_vlrl.report.plots.curves import color_of
from npu_vlrl.report.plots.runs import Group
from npu_vlrl.report.plots.style import BELOW, COLUMN, GREY
from npu_vlrl.report.record_schema import read_record
from npu_vlrl.tasks.rotation.angle import read_angle
from npu_vlrl.workflow.rewards.tagged import last_tag

DATA_SOURCE = "rotation"
FINE, COARSE = 15, 30
"""Widths of a bin in degrees; the wide ones where all right angles are multiples of them."""


@dataclass(frozen=True)
class Angles:
    """Angles of a group's episodes that ended with an angle, in degrees from 0 to below 360, arrays [episodes]."""

    step: np.ndarray
    right: np.ndarray
    predicted: np.ndarray


def read_angles(folders: Sequence[Path]) -> Angles:
    """Reads the angles of the recorded episodes of training; of evaluations where nothing else was recorded."""
    trained: list[tuple[int, float, float]] = []
    evaluated: list[tuple[int, float, float]] = []
    for folder in folders:
        for record in read_lines(folder / "trajectories.jsonl", read_record):
            if record.get("data_source") == DATA_SOURCE and record.get("turns") and record.get("answer"):
                right, content = read_angle(record["answer"]), last_tag(record["turns"][-1]["text"])
                predicted = None if content is None else read_angle(content)
                if right is not None and predicted is not None:
                    kind = trained if record["group"].startswith("step") else evaluated
                    kind.append((record["step"], right % 360, predicted % 360))
    return Angles(*np.array(trained or evaluated).reshape(-1, 3).T)


def draw_angles(groups: Sequence[Group]) -> Figure | None:
    """Draws a row for each group: predicted against right angles, and how often each was predicted.

    None where no run has a predicted angle.
    """
    found = [(group, read_angles([run.folder for run in group.runs])) for group in groups]
    found = [(group, angles) for group, angles in found if len(angles.predicted)]
    if not found:
        return None
    figure = Figure((COLUMN, 1.75 * len(found) + 0.2), layout="constrained")
    rows = figure.subplots(len(found), 2, squeeze=False)
    for (group, angles), (left, right) in zip(found, rows, strict=True):
        _draw_pairs(left, angles)
        _draw_shares(right, angles)
        if len(found) > 1:
            left.set_title(group.name, fontsize=7)
    figure.legend(*rows[0][1].get_legend_handles_labels(), **BELOW, ncols=2)
    return figure


def later_half(angles: Angles) -> np.ndarray:
    """Mask of the second half of the recorded steps, bool [episodes]; of all episodes where there is one step only."""
    first, last = angles.step.min(), angles.step.max()
    later: np.ndarray = angles.step >= (first + last) / 2
    return later


def bin_edges(angles: Angles) -> np.ndarray:
    """Edges of the bins in degrees, [bins + 1]. 0 is the middle of the first bin, so are 90, 180 and 270 of theirs."""
    width = FINE if (angles.right % COARSE).any() else COARSE
    return np.arange(-width / 2, 360, width)


def wrapped(degrees: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The same angles, mapped to the range from the first edge to below the last one."""
    same: np.ndarray = (degrees - edges[0]) % 360 + edges[0]
    return same


def shares(degrees: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of the angles in each bin, [bins]."""
    return np.histogram(wrapped(degrees, edges), edges)[0] / max(1, len(degrees))


def _draw_pairs(axes: Axes, angles: Angles) -> None:
    """Draws the second half: on the diagonal the model is right; the corners beside it are near, since 0 is 360."""
    late, edges = later_half(angles), bin_edges(angles)
    pairs = (wrapped(angles.right[late], edges), wrapped(angles.predicted[late], edges))
    counts = np.histogram2d(*pairs, (edges, edges))[0]
    shown = np.ma.masked_equal(counts.T, 0)
    axes.grid(False)
    axes.pcolormesh(edges, edges, shown, cmap="Blues", vmin=-counts.max() / 3, rasterized=True)
    axes.plot(edges, edges, color=GREY, linewidth=0.5, dashes=(3, 3))
    axes.set(xlabel="right angle (°)", ylabel="predicted angle (°)", aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(90))


def _draw_shares(axes: Axes, angles: Angles) -> None:
    late, edges = later_half(angles), bin_edges(angles)
    kinds = [("right", angles.right, GREY, "--")]
    if not late.all():
        kinds.append(("predicted, first half", angles.predicted[~late], color_of(5), "-"))
    kinds.append(("predicted, second half", angles.predicted[late], color_of(0), "-"))
    for label, degrees, color, style in kinds:
        axes.stairs(shares(degrees, edges), edges, label=label, color=color, linestyle=style, baseline=None)
    axes.set(xlabel="angle (°)", ylabel="share of answers", xlim=(edges[0], edges[-1]), ylim=(0, None))
    axes.xaxis.set_major_locator(MultipleLocator(90))
