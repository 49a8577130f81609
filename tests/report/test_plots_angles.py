"""Predicted against right angles, from records to figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.collections import QuadMesh
from matplotlib.patches import StepPatch

from npu_vlrl.report.plots.angles import Angles, bin_edges, draw_angles, later_half, read_angles, shares
from npu_vlrl.report.plots.runs import Group, group_runs, read_run
from tests.support.recorded import run_folder


def record(step: int, right: str, said: str, group: str = "step{}/0/x", **changes: Any) -> dict[str, Any]:
    action = {"kind": "action", "token_ids": []}
    turns = [{"text": text, "new_context": [], "action": action} for text in ("<answer>1</answer>", said)]
    return {
        "step": step,
        "id": f"{group.format(step)}/0",
        "group": group.format(step),
        "data_source": "rotation",
        "answer": right,
        "turns": turns,
    } | changes


def group_of(folder: Path, records: list[dict[str, Any]]) -> list[Group]:
    return group_runs([read_run(run_folder(folder, trajectories=records))])


def test_the_last_answer_of_training_episodes_is_read(tmp_path: Path) -> None:
    records = [
        record(0, "90", "I say <answer>-30</answer>"),
        record(1, "370", "<answer>45°</answer>"),
        record(1, "10", "<answer>up</answer>"),
        record(1, "10", "no tag 10"),
        record(1, "10", "<answer>10</answer>", "final{}.0/0/x"),
        record(1, "left", "<answer>10</answer>", data_source="photo"),
        record(1, "10", "", turns=[]),
        {"step": 2, "id": "of a version that recorded less", "group": "step2/0/x"},
    ]
    angles = read_angles([run_folder(tmp_path / "a", trajectories=records)])
    assert np.array([angles.step, angles.right, angles.predicted]).tolist() == [[0, 1], [90, 10], [330, 45]]


def test_evaluations_are_read_where_nothing_else_was_recorded(tmp_path: Path) -> None:
    records = [record(0, "10", "<answer>20</answer>", "evaluation0.0/0/x")]
    assert read_angles([run_folder(tmp_path / "a", trajectories=records)]).predicted.tolist() == [20]
    assert read_angles([run_folder(tmp_path / "b")]).predicted.shape == (0,)


def test_bins_are_centred_and_close_the_circle() -> None:
    def angles(*right: float) -> Angles:
        return Angles(np.zeros(len(right)), np.array(right), np.array(right))

    assert bin_edges(angles(0, 90, 330)).tolist() == list(range(-15, 360, 30))
    edges = bin_edges(angles(0, 95, 330))
    assert edges[0] == -7.5 and edges[-1] == 352.5 and len(edges) == 25
    # 352.4 is the last bin's; 352.5 and 7.4 lie around 0
    found = shares(np.array([352.4, 352.5, 359.9, 0.0, 7.4, 7.5]), edges) * 6
    assert np.round(found).astype(int).tolist() == [4, 1, *[0] * 21, 1]


def test_halves_of_the_recorded_steps() -> None:
    angles = Angles(np.array([10, 20, 29, 30, 50]), np.zeros(5), np.zeros(5))
    assert later_half(angles).tolist() == [False, False, False, True, True]
    assert later_half(Angles(np.array([3, 3]), np.zeros(2), np.zeros(2))).all()


def test_the_figure_counts_pairs_of_the_second_half(tmp_path: Path) -> None:
    records = [
        record(step, str(30 * k), f"<answer>{(30 * k + 60 * (step == 0)) % 360}</answer>")
        for step in (0, 4)
        for k in range(12)
    ]
    records.append(record(4, "0", "<answer>180</answer>"))
    figure = draw_angles(group_of(tmp_path / "a", records))
    assert figure is not None
    left, right = figure.axes
    [mesh] = [c for c in left.collections if isinstance(c, QuadMesh)]
    counts = np.ma.filled(mesh.get_array(), 0)
    expected = np.eye(12)
    expected[6, 0] = 1  # the row is what was predicted, the column what was right
    np.testing.assert_equal(counts.reshape(12, 12), expected)
    found = {str(p.get_label()): p.get_data().values for p in right.patches if isinstance(p, StepPatch)}
    assert list(found) == ["right", "predicted, first half", "predicted, second half"]
    np.testing.assert_allclose(found["predicted, first half"], np.full(12, 1 / 12))
    second = np.full(12, 1 / 13)
    second[6] = 2 / 13
    np.testing.assert_allclose(found["predicted, second half"], second)
    np.testing.assert_allclose(found["right"] * 25, [3, *[2] * 11])


def test_no_figure_without_an_angle(tmp_path: Path) -> None:
    assert draw_angles(group_of(tmp_path / "a", [record(0, "90", "<answer>up</answer>")])) is None
