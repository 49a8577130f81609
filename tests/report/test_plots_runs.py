"""What is read of run folders, and which of them belong together."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from npu_vlrl.config import ConfigError
from npu_vlrl.report.plots.runs import common_curve, group_runs, read_lines, read_run
from tests.support.recorded import run_folder


def test_values_by_step_with_gaps(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval/all/reward": 0.25},
        {"step": 0, "reward": 0.5, "kl": None},
        {"step": 1, "reward": None},
        {"step": 2, "reward": 1},
        {"reward": 9.0},
        {"step": 10**30, "reward": 1},  # valid JSON that no array holds
        {"step": 3, "reward": 10**400},
    ]
    run = read_run(run_folder(tmp_path / "a", lines))
    assert run.points("reward") == {0: 0.5, 2: 1.0}
    assert run.points("eval/all/reward") == {0: 0.25}
    assert run.points("kl") == run.points("nothing") == {}


def test_a_cut_last_line_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0}\n{"step": 1, "text": "\xe2\x80\xa8"}\n{"step": 2, "rew')
    assert [line["step"] for line in read_lines(file)] == [0, 1]  # U+2028 ends no line
    file.write_bytes(b'{"step": 0}\n{"step"\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 2 is no record"):
        list(read_lines(file))
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder: it has no config.yaml"):
        read_run(tmp_path)
    for text in ("[1, 2]", "a: [", "just text"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            read_run(tmp_path)


def test_runs_that_differ_in_the_seed_only_form_a_group(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / "a", train={"seed": 0}, run={"dir": "a"}),
        run_folder(tmp_path / "b", train={"seed": 1}, optim={"lr": 1e-5}),
        run_folder(tmp_path / "c", train={"seed": 2}, run={"dir": "c", "log_every": 7}),
    ]
    groups = group_runs([read_run(folder) for folder in folders])
    assert [(group.name, [run.folder.name for run in group.runs]) for group in groups] == [
        ("lr=1e-06", ["a", "c"]),
        ("lr=1e-05", ["b"]),
    ]
    assert [group.name for group in group_runs([read_run(folders[0]), read_run(folders[2])])] == [""]


def test_a_default_that_was_written_out_is_no_difference(tmp_path: Path) -> None:
    one, other = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", optim={"lr": 1e-6})
    assert len(group_runs([read_run(one), read_run(other)])) == 1


def test_names_tell_what_differs(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", optim={"lr": 1e-4}, critic={"lr": 1e-3}, algorithm={"preset": "dapo"})
    b = run_folder(tmp_path / "b", critic={"lr": 1e-2}, algorithm={"preset": "dapo", "clip_high": 0.3})
    c = run_folder(tmp_path / "c", optim={"lr": 1e-4}, critic={"lr": 1e-2})

    def names(*folders: Path) -> list[str]:
        return [group.name for group in group_runs([read_run(folder) for folder in folders])]

    assert names(a, c) == ["preset=dapo, lr=0.001", "preset=grpo, lr=0.01"]
    # two keys end with the same word, and what is not set says so
    assert names(a, b) == [
        "clip_high=none, critic.lr=0.001, optim.lr=0.0001",
        "clip_high=0.3, critic.lr=0.01, optim.lr=1e-06",
    ]
    assert names(a, b, c) == ["a", "b", "c"]  # four keys are too many for a name


def test_a_configuration_of_another_version_is_taken_as_it_stands(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / str(k), train={"seed": k, "gone": 5}, optim={"lr": lr}) for k, lr in ((0, 1), (1, 2))
    ]
    assert [group.name for group in group_runs([read_run(folder) for folder in folders])] == ["lr=1", "lr=2"]


def test_curves_over_all_steps_of_several_runs() -> None:
    steps, values = common_curve([{0: 1.0, 2: 3.0}, {0: 5.0, 1: 6.0}])
    assert steps.tolist() == [0, 1, 2]
    np.testing.assert_equal(values, [[1.0, math.nan, 3.0], [5.0, 6.0, math.nan]])
    steps, values = common_curve([{}, {}])
    assert steps.shape == (0,) and values.shape == (2, 0)
