"""Figures of metrics over steps: a line for each group of runs, with the range of its seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from npu_vlrl.report.metrics import FIRST_TURNS
from npu_vlrl.report.plots.runs import Group, common_curve
from npu_vlrl.report.plots.style import BELOW, COLORS, COLUMN, DASHES, GREY, HEIGHT, PAGE

MOST_POINTS = 80
"""Maximum number of points of a line: a column's width shows no more. Further steps are merged."""


@dataclass(frozen=True)
class Series:
    """One metric of a figure. Evaluations are few and drawn with markers."""

    metric: str
    name: str = ""

    @property
    def evaluated(self) -> bool:
        return self.metric.startswith("eval/")


@dataclass(frozen=True)
class Curve:
    """One figure. `together` reduces the values of steps that are merged."""

    name: str
    title: str
    unit: str
    series: tuple[Series, ...]
    together: Literal["mean", "max"] = "mean"
    scale: Literal["linear", "log"] = "linear"
    limits: tuple[float | None, float | None] = (None, None)


def _trained_and_evaluated(trained: str, evaluated: str) -> tuple[Series, ...]:
    return Series(trained, "training"), Series(f"eval/all/{evaluated}", "evaluation")


CURVES = (
    Curve("reward", "Reward", "mean reward", _trained_and_evaluated("reward", "reward")),
    Curve(
        "accuracy",
        "Accuracy of the first answer",
        "share",
        _trained_and_evaluated("first_try_accuracy", "accuracy"),
        limits=(0, 1.02),
    ),
    Curve(
        "solved", "Solved after retries", "share", _trained_and_evaluated("solved", "after_retries"), limits=(0, 1.02)
    ),
    Curve("turns", "Turns", "per episode", _trained_and_evaluated("turns", "turns"), limits=(0, None)),
    Curve("tool_calls", "Tool calls", "per episode", (Series("tool_calls"),), limits=(0, None)),
    Curve("response_length", "Response length", "tokens per turn", (Series("action_tokens"),), limits=(0, None)),
    Curve(
        "response_length_by_turn",
        "Response length by turn",
        "tokens",
        tuple(Series(f"action_tokens/turn{k}", f"turn {k}") for k in range(1, FIRST_TURNS + 1)),
        limits=(0, None),
    ),
    Curve("entropy", "Entropy", "nats per token", (Series("entropy"),), limits=(0, None)),
    Curve("kl", "KL to the reference", "nats per token", (Series("kl"),), limits=(0, None)),
    Curve(
        "logprob_gap",
        "Learner–engine gap",
        "largest, nats",
        (Series("logprob_gap", "sampled tokens"), Series("probe_gap", "probe")),
        "max",
        scale="log",
    ),
    Curve(
        "throughput",
        "Throughput",
        "tokens per second",
        (Series("sampled_tokens_per_second"),),
        limits=(0, None),
    ),
)


@dataclass(frozen=True)
class Line:
    """One drawn line: `low` and `high` are the smallest and largest of its runs, all arrays [points]; NaN is a gap."""

    label: str
    series: str
    color: str
    dashes: tuple[float, ...]
    evaluated: bool
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def lines_of(curve: Curve, groups: Sequence[Group]) -> list[Line]:
    """Lines of a figure. Colours distinguish groups, or series where there is one group only."""
    present = [s for s in curve.series if any(run.points(s.metric) for group in groups for run in group.runs)]
    lines = []
    for number, group in enumerate(groups):
        for position, series in enumerate(present):
            steps, values = common_curve([run.points(series.metric) for run in group.runs])
            if not len(steps):
                continue
            width = 1 if series.evaluated else math.ceil((steps[-1] - steps[0] + 1) / MOST_POINTS)
            x, values = _put_together(steps, values, width, curve.together)
            lines.append(
                Line(
                    _label(group, series.name if len(present) > 1 else ""),
                    series.name,
                    color_of(number if len(groups) > 1 else position),
                    DASHES[position % len(DASHES)],
                    series.evaluated,
                    x,
                    # a step that one of the runs lacks is a gap: else the mean jumps where a run ends
                    values.mean(axis=0),
                    values.min(axis=0),
                    values.max(axis=0),
                    len(group.runs),
                )
            )
    return lines


def _label(group: Group, series: str) -> str:
    """Label that distinguishes a line from the others of its figure, with its number of runs."""
    name, number = ", ".join(filter(None, (group.name, series))), len(group.runs)
    if number == 1:
        return name
    return f"{name} ({number} runs)" if name else f"mean of {number} runs"


def _put_together(
    steps: np.ndarray, values: np.ndarray, width: int, how: Literal["mean", "max"]
) -> tuple[np.ndarray, np.ndarray]:
    """Merges blocks of `width` steps, from the first step on: their mean steps [B] and values [runs, B].

    A step without a value is ignored; a block in which a run has no value is NaN there.
    """
    if width == 1:
        return steps.astype(float), values
    block = (steps - steps[0]) // width
    x, joined = [], []
    for number in np.unique(block):
        own = values[:, block == number]
        has = ~np.isnan(own)
        total = np.where(has, own, 0.0).sum(axis=1) if how == "mean" else np.where(has, own, -np.inf).max(axis=1)
        count = has.sum(axis=1)
        joined.append(np.where(count > 0, total / np.maximum(count, 1) if how == "mean" else total, np.nan))
        x.append(steps[block == number].mean())
    return np.array(x), np.array(joined).T


def draw_curve(curve: Curve, groups: Sequence[Group]) -> Figure | None:
    """Draws a figure of a column's width; None where no run has the metric."""
    lines = lines_of(curve, groups)
    if not lines:
        return None
    columns = 2 if max(len(line.label) for line in lines) <= 26 else 1
    rows = math.ceil(sum(bool(line.label) for line in lines) / columns)
    figure = Figure((COLUMN, HEIGHT + 0.14 * rows), layout="constrained")
    axes = figure.subplots()
    _draw(axes, curve, lines)
    if rows:
        figure.legend(**BELOW, ncols=columns)
    return figure


def draw_overview(curves: Sequence[Curve], groups: Sequence[Group]) -> Figure | None:
    """Draws all curves that have data, three side by side, over a page's width."""
    drawn = [(curve, lines) for curve in curves if (lines := lines_of(curve, groups))]
    if not drawn:
        return None
    rows = math.ceil(len(drawn) / 3)
    figure = Figure((PAGE, 1.7 * rows + 0.25), layout="constrained")
    panels = list(figure.subplots(rows, 3, squeeze=False).flat)
    for (curve, lines), axes in zip(drawn, panels, strict=False):
        _draw(axes, curve, lines)
        series = {line.series: line for line in lines if not line.evaluated}
        if len(series) > 1:
            handles = [_stroke_alone(line, GREY if len(groups) > 1 else line.color) for line in series.values()]
            axes.legend(handles=handles, fontsize=6, labelspacing=0.2, borderaxespad=0.2)
    for axes in panels[len(drawn) :]:
        axes.remove()
    handles = _overview_handles(groups, [line for _, lines in drawn for line in lines])
    figure.legend(handles=handles, **BELOW, ncols=min(4, len(handles)))
    return figure


def _stroke_alone(line: Line, color: str) -> Line2D:
    return Line2D([], [], color=color, label=line.series, **_stroke(line))


def _overview_handles(groups: Sequence[Group], lines: Sequence[Line]) -> list[Line2D]:
    """Legend of colours and markers, which are the same in all panels."""
    named = [Line2D([], [], color=color_of(k), label=label) for k, g in enumerate(groups) if (label := _label(g, ""))]
    if any(line.evaluated for line in lines):
        pair = (GREY, GREY) if len(groups) > 1 else (color_of(0), color_of(1))
        named.append(Line2D([], [], color=pair[0], label="training"))
        named.append(Line2D([], [], color=pair[1], dashes=DASHES[1], linewidth=0.6, marker="o", label="evaluation"))
    return named


def _draw(axes: Axes, curve: Curve, lines: Sequence[Line]) -> None:
    for line in lines:
        width, size = (0.6, 3.2) if line.evaluated else (1.2, 0)  # what lies between evaluations nobody measured
        axes.plot(line.x, line.mean, label=line.label, color=line.color, linewidth=width, zorder=3, **_stroke(line))
        if line.runs > 1 and line.evaluated:
            axes.vlines(line.x, line.low, line.high, color=line.color, linewidth=0.9, zorder=2)
        elif line.runs > 1:
            axes.fill_between(line.x, line.low, line.high, color=line.color, alpha=0.18, linewidth=0)
    axes.set(title=curve.title, ylabel=curve.unit, xlabel="step", ylim=curve.limits)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if curve.scale == "log":
        _whole_decades(axes, lines)


def _stroke(line: Line) -> dict[str, Any]:
    dashes = {"dashes": line.dashes} if line.dashes else {}
    return dashes | ({"marker": "o"} if line.evaluated else {})


def _whole_decades(axes: Axes, lines: Sequence[Line]) -> None:
    """Makes the axis logarithmic, between whole powers of ten; zero has no place on it."""
    values = np.concatenate([np.concatenate([line.low, line.high]) for line in lines])
    values = values[values > 0]  # NaN is not, either
    if len(values):
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(10 ** math.floor(math.log10(values.min())), 10 ** math.ceil(math.log10(values.max()) + 1e-9))
