"""The numbers in the figures, read back from the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection, LineCollection
from matplotlib.figure import Figure

from npu_vlrl.report.plots.curves import COLORS, CURVES, MOST_POINTS, Curve, Series, draw_curve, draw_overview, lines_of
from npu_vlrl.report.plots.runs import Group, group_runs, read_run
from npu_vlrl.report.plots.style import styled
from tests.support.recorded import run_folder

REWARD = next(curve for curve in CURVES if curve.name == "reward")
GAP = next(curve for curve in CURVES if curve.name == "logprob_gap")


def groups_of(folder: Path, *runs: tuple[dict[str, Any], list[dict[str, Any]]]) -> list[Group]:
    return group_runs([read_run(run_folder(folder / str(k), lines, **c)) for k, (c, lines) in enumerate(runs)])


def steps(metric: str, *values: float | None) -> list[dict[str, Any]]:
    return [{"step": step, metric: value} for step, value in enumerate(values)]


def drawn(figure: Figure | None) -> list[tuple[str, list[float], list[float]]]:
    """Label, x and y of every line in the first panel."""
    assert figure is not None
    lines = figure.axes[0].get_lines()
    return [(str(line.get_label()), list(line.get_xdata()), list(line.get_ydata())) for line in lines]


def test_a_single_run_is_drawn_as_it_is_with_a_gap(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ({}, steps("reward", 0.5, None, 0.75, 1.0)))
    [(label, x, y)] = drawn(draw_curve(REWARD, groups))
    assert label.startswith("_") and (x, y) == ([0, 2, 3], [0.5, 0.75, 1.0])


def test_seeds_become_a_mean_and_their_range(tmp_path: Path) -> None:
    seeds = [{"train": {"seed": k}} for k in range(3)]
    values = [steps("reward", 0.0, 1.0, 4.0, 9.0), steps("reward", 3.0, None, 2.0, 9.0), steps("reward", 6.0, 1.0, 0.0)]
    figure = draw_curve(REWARD, groups_of(tmp_path, *zip(seeds, values, strict=True)))
    [(label, x, y)] = drawn(figure)
    assert label == "mean of 3 runs"
    np.testing.assert_equal(y, [3.0, np.nan, 2.0, np.nan])  # a run lacks step 1, and one ended before step 3
    assert figure is not None
    [band] = [c for c in figure.axes[0].collections if isinstance(c, FillBetweenPolyCollection)]
    corners = {tuple(point) for path in band.get_paths() for point in path.vertices.tolist()}
    assert {(0.0, 0.0), (0.0, 6.0), (2.0, 0.0), (2.0, 4.0)} == corners
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mean of 3 runs"]


def test_other_configurations_are_lines_of_their_own(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/all/reward": 0.25}, *steps("reward", 0.5, 0.6), {"step": 2, "eval/all/reward": 0.75}]
    runs = [({"optim": {"lr": lr}, "train": {"seed": seed}}, lines) for lr, seed in ((1e-3, 0), (1e-3, 1), (1e-4, 0))]
    groups = groups_of(tmp_path, *runs)
    figure = draw_curve(REWARD, groups)
    assert drawn(figure) == [
        ("lr=0.001, training (2 runs)", [0, 1], [0.5, 0.6]),
        ("lr=0.001, evaluation (2 runs)", [0, 2], [0.25, 0.75]),
        ("lr=0.0001, training", [0, 1], [0.5, 0.6]),
        ("lr=0.0001, evaluation", [0, 2], [0.25, 0.75]),
    ]
    assert figure is not None
    colors = [line.get_color() for line in figure.axes[0].get_lines()]
    assert colors == [COLORS[0], COLORS[0], COLORS[1], COLORS[1]]
    markers = [line.get_marker() for line in figure.axes[0].get_lines()]
    assert [marker == "o" for marker in markers] == [False, True, False, True]
    [ranges] = [c for c in figure.axes[0].collections if type(c) is LineCollection]
    assert [segment.tolist() for segment in ranges.get_segments()] == [[[0, 0.25]] * 2, [[2, 0.75]] * 2]


@pytest.mark.parametrize(
    ("curve", "expected"), [(REWARD, lambda block: block.mean()), (GAP, lambda block: block.max())]
)
def test_long_runs_are_drawn_in_blocks(tmp_path: Path, curve: Curve, expected: Any) -> None:
    """Their mean; of the gap between learner and engine the largest, which is what matters."""
    number = 3 * MOST_POINTS
    values = np.random.default_rng(0).uniform(1e-6, 1e-3, number)
    metric = curve.series[0].metric
    [(_, x, y)] = drawn(draw_curve(curve, groups_of(tmp_path, ({}, steps(metric, *values.tolist())))))
    blocks = values.reshape(-1, 3)
    assert len(x) == MOST_POINTS and x[:2] == [1.0, 4.0]
    np.testing.assert_allclose(y, [expected(block) for block in blocks])


def test_a_block_without_values_is_a_gap_and_a_block_with_some_is_their_mean(tmp_path: Path) -> None:
    values: list[float | None] = [1.0] * (2 * MOST_POINTS)
    values[0], values[1], values[2], values[3] = 5.0, None, None, None
    other = [2.0] * (2 * MOST_POINTS)
    runs = [({"train": {"seed": k}}, steps("reward", *own)) for k, own in enumerate((values, other))]
    [line] = lines_of(REWARD, groups_of(tmp_path, *runs))
    np.testing.assert_equal(line.mean[:3], [3.5, np.nan, 1.5])
    np.testing.assert_equal(line.low[:3], [2.0, np.nan, 1.0])
    np.testing.assert_equal(line.high[:3], [5.0, np.nan, 2.0])


def test_a_metric_that_no_run_has_gives_no_figure(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, ({}, steps("reward", 1.0)))
    assert draw_curve(Curve("x", "X", "", (Series("nothing"),)), groups) is None
    assert draw_curve(REWARD, groups_of(tmp_path / "empty", ({}, []))) is None
    assert draw_overview(CURVES, groups_of(tmp_path / "none", ({}, []))) is None


def test_a_group_without_the_metric_leaves_the_others_their_colours(tmp_path: Path) -> None:
    runs = [({"optim": {"lr": 1e-3}}, steps("turns", 1.0)), ({"optim": {"lr": 1e-4}}, steps("reward", 0.5))]
    [line] = lines_of(REWARD, groups_of(tmp_path, *runs))
    assert (line.label, line.color) == ("lr=0.0001", COLORS[1])


def test_the_gap_has_an_axis_of_whole_decades_and_zero_does_not_matter(tmp_path: Path) -> None:
    figure = draw_curve(GAP, groups_of(tmp_path, ({}, steps("logprob_gap", 0.0, 3e-6, 2e-5))))
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_yscale() == "log" and axes.get_ylim() == pytest.approx((1e-6, 1e-4))
    zeros = draw_curve(GAP, groups_of(tmp_path / "zero", ({}, steps("logprob_gap", 0.0, 0.0))))
    assert zeros is not None and zeros.axes[0].get_yscale() == "linear"


def test_the_overview_has_a_panel_for_each_curve_there_is(tmp_path: Path) -> None:
    lengths = {"action_tokens/turn1": 4, "action_tokens/turn2": 3}
    lines = [{"step": k, "reward": k, "turns": 2, "eval/all/turns": 1, **lengths} for k in range(3)]
    runs = [({"optim": {"lr": lr}}, lines) for lr in (1e-3, 1e-4)]
    with styled():
        figure = draw_overview(CURVES, groups_of(tmp_path, *runs))
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Reward", "Turns", "Response length by turn"]
    own = figure.axes[2].get_legend()
    assert own is not None and [text.get_text() for text in own.get_texts()] == ["turn 1", "turn 2"]
    assert figure.axes[0].get_legend() is None
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["lr=0.001", "lr=0.0001", "training", "evaluation"]


def test_every_curve_reads_a_metric_that_a_training_records() -> None:
    """Of a curve whose metric is misspelt `plot` would say that no run has it."""
    recorded = {"reward", "first_try_accuracy", "solved", "turns", "tool_calls", "action_tokens", "entropy", "kl"}
    recorded |= {"logprob_gap", "probe_gap", "sampled_tokens_per_second"} | {
        f"action_tokens/turn{k}" for k in range(1, 9)
    }
    recorded |= {f"eval/all/{name}" for name in ("reward", "accuracy", "after_retries", "turns")}
    assert {series.metric for curve in CURVES for series in curve.series} == recorded
