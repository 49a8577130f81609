"""Two evaluations sample by sample, by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from npu_vlrl.config import ConfigError, load_config
from npu_vlrl.report import evaluated, tables
from npu_vlrl.report.comparison import changes, compare, results
from npu_vlrl.report.results import task_result
from npu_vlrl.report.run_folder import RunFolder
from npu_vlrl.report.statistics import bootstrap_intervals
from npu_vlrl.types import Task, Trajectory, Verdict
from tests.report.test_results import LATE, RIGHT, WRONG, result
from tests.support.program import config_file, program, records
from tests.support.scripted import Verdicts, a_task, an_image, play, workflow

YES, NO = Verdict(1.0, True), Verdict(0.0, False)


def tasks(number: int = 4) -> list[Task]:
    return [dataclasses.replace(a_task(an_image(28, seed=n), f"{n}?"), id=f"t/{n}") for n in range(number)]


def evaluation(folder: Path, verdicts: list[list[list[Verdict]]], given: list[Task] | None = None) -> Path:
    """A finished evaluation with real episodes: for each task, for each answer, the verdicts of its turns."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = load_config(config_file(folder.parent, data={"train": {"generator": "arrow"}}), [f"run.dir={folder}"])
    run, found = RunFolder(config), []
    run.begin()
    for task, answers in zip(given or tasks(len(verdicts)), verdicts, strict=True):
        played: list[Trajectory] = []
        for member, turns in enumerate(answers):
            done = play(workflow(Verdicts(turns), max_turns=len(turns)), ["a"] * len(turns), task)
            played.append(dataclasses.replace(done, group=f"evaluation0.0/{task.id}", member=member))
        run.trajectories(0, played, {})
        lines = records(folder, "trajectories.jsonl")[-len(played) :]
        found.append(task_result(task, lines, "best", 1.0, patch_size=14))
    evaluated.write(folder, {"seed": 3, "answers": len(verdicts[0])}, [], found)
    return folder


FIRST = [[[YES]], [[NO, YES]], [[NO, NO]], [[YES]]]
SECOND = [[[NO, NO]], [[YES]], [[NO, NO]], [[YES]]]
"""Task 0 is won; task 1 is solved by both, by the second at once; the others stay the same."""


def test_by_hand(tmp_path: Path) -> None:
    first, second = evaluation(tmp_path / "new", FIRST), evaluation(tmp_path / "old", SECOND)
    values = compare(first, second, tmp_path / "out")
    assert values["labels"] == ["new", "old"] and list(values["results"]) == ["all", *evaluated.KINDS]
    found = values["results"]["all"]
    solved, at_once = found["after_retries"], found["accuracy"]
    assert {key: solved[key] for key in ("won", "lost", "same", "p", "means")} == {
        "won": 1,
        "lost": 0,
        "same": 3,
        "p": 1.0,
        "means": [0.75, 0.5],
    }
    assert [at_once[key] for key in ("won", "lost", "same", "p")] == [1, 1, 2, 1.0] and at_once["means"] == [0.5, 0.5]
    differences = np.array([[1.0, 1.0], [0.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
    (low, high), (low_first, high_first) = bootstrap_intervals(differences, seed=3)
    assert solved["difference"] == {"mean": 0.25, "low": low, "high": high}
    assert at_once["difference"] == {"mean": 0.0, "low": low_first, "high": high_first}
    assert values["changed"] == [{"task": "t/0", "change": "won"}, {"task": "t/1", "change": "lost"}]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == values


def test_the_folder_of_a_comparison_holds_both_answers_in_a_group(tmp_path: Path) -> None:
    first, second = evaluation(tmp_path / "new", FIRST), evaluation(tmp_path / "old", SECOND)
    out = tmp_path / "out"
    compare(first, second, out)
    found = records(out, "trajectories.jsonl")
    assert [(r["id"], r["group"], r["label"], r["solved"]) for r in found] == [
        ("won/0/t/0/0", "won/0/t/0", "new", True),
        ("won/0/t/0/1", "won/0/t/0", "old", False),
        ("lost/1/t/1/0", "lost/1/t/1", "new", True),
        ("lost/1/t/1/1", "lost/1/t/1", "old", True),
    ]
    originals = [records(first, "trajectories.jsonl"), records(second, "trajectories.jsonl")]
    named = ("id", "group", "label")
    for index, record in enumerate(found):
        original = originals[index % 2][index // 2]
        assert {k: v for k, v in record.items() if k not in named} == {
            k: v for k, v in original.items() if k not in named
        }
    hashes = {i["hash"] for r in found for t in r["turns"] for s in t["new_context"] for i in s.get("images", ())}
    assert {file.stem for file in (out / "images").iterdir()} == hashes and len(hashes) == 2
    assert (out / "config.yaml").read_bytes() == (first / "config.yaml").read_bytes()
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    compare(first, second, out)  # again
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_several_answers_are_compared_by_their_mean(tmp_path: Path) -> None:
    three = [[[YES], [NO], [NO]], [[YES], [YES], [NO]]]
    other = [[[NO], [NO], [YES]], [[NO], [YES], [NO]]]
    values = compare(evaluation(tmp_path / "a" / "r", three), evaluation(tmp_path / "b" / "r", other), tmp_path / "out")
    found = values["results"]["all"]["after_retries"]
    assert (found["won"], found["lost"], found["same"]) == (1, 0, 1)
    assert found["difference"]["mean"] == pytest.approx(1 / 6)
    assert values["labels"] == [str(tmp_path / "a" / "r"), str(tmp_path / "b" / "r")]  # of the same name
    group = records(tmp_path / "out", "trajectories.jsonl")
    assert [r["id"] for r in group] == [f"won/1/t/1/{n}" for n in range(6)]


def test_a_paired_interval_is_narrower_than_the_models_are_apart() -> None:
    """Tasks differ much, and the second model always does a little worse."""
    pairs = [
        (result(*a), result(*b)) for a, b in ((((RIGHT, RIGHT)), (RIGHT, WRONG)), (((WRONG, LATE)), (WRONG, WRONG)))
    ]
    found = results(pairs * 10, seed=0)["all"]["after_retries"]
    assert found["difference"] == {"mean": 0.5, "low": 0.5, "high": 0.5} and found["won"] == 20
    assert found["p"] == pytest.approx(2 / 2**20)
    assert changes(pairs) == {0: "won", 1: "won"}


def changed(task: Task, **what: Any) -> Task:
    return dataclasses.replace(task, **what)


def test_other_tasks_are_refused_by_the_first_that_differs(tmp_path: Path) -> None:
    first, given = evaluation(tmp_path / "new", FIRST), tasks()
    others = {
        "task 2, t/2 in .*/new, asks or judges otherwise in .*/b": [
            *given[:2],
            changed(given[2], answer="x"),
            given[3],
        ],
        "task 1, t/1 in .*/new, is t/9 in .*/b": [given[0], changed(given[1], id="t/9"), *given[2:]],
    }
    for number, (message, its) in enumerate(others.items()):
        second = evaluation(tmp_path / str(number) / "b", SECOND, its)
        with pytest.raises(ConfigError, match=message):
            compare(first, second, tmp_path / "out")
    fewer = evaluation(tmp_path / "c", SECOND[:3])
    with pytest.raises(ConfigError, match=r"the tasks differ: t/3 is in .*/new only"):
        compare(fewer, first, tmp_path / "out")
    twice = evaluation(tmp_path / "d", [[*answers, *answers] for answers in SECOND])
    with pytest.raises(ConfigError, match="has 1 answers to each task and .*/d 2"):
        compare(first, twice, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_comparison_stays_as_it_is(tmp_path: Path) -> None:
    first, second = evaluation(tmp_path / "new", FIRST), evaluation(tmp_path / "old", SECOND)
    (tmp_path / "mine").mkdir()
    compare(first, second, tmp_path / "mine")  # an empty one will do
    for taken in (first, tmp_path / "config.yaml"):
        with pytest.raises(ConfigError, match="exists and holds no comparison; choose another folder with --out"):
            compare(first, second, taken)
    with pytest.raises(ConfigError, match="holds no finished evaluation"):
        compare(first, tmp_path / "mine", tmp_path / "out")


def test_trajectories_of_another_evaluation_are_refused(tmp_path: Path) -> None:
    first, second = evaluation(tmp_path / "new", FIRST), evaluation(tmp_path / "old", SECOND)
    file = second / "trajectories.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for content in (lines[:3], [*lines, lines[0]], [lines[1], lines[0], *lines[2:]]):
        file.write_bytes(b"".join(content))
        with pytest.raises(ConfigError, match=r"trajectories\.jsonl is not that of the evaluation"):
            compare(first, second, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_compares_finished_evaluations(tmp_path: Path) -> None:
    first, second = evaluation(tmp_path / "new", FIRST), evaluation(tmp_path / "old", SECOND)
    done = program("eval", "--run-dir", first, "--against", second)
    assert (done.code, done.err) == (0, "")
    assert "after_retries: new against old" in done.out
    assert done.out.endswith(f"changed tasks: 2; their trajectories are a run folder: {first / 'against' / 'old'}\n")
    done = program("eval", "--run-dir", first, "--against", second, "--out", tmp_path / "out")
    assert done.code == 0 and (tmp_path / "out" / "comparison.json").is_file()
    console = Console(width=100, record=True, file=(tmp_path / "screen").open("w"))
    console.print(*tables.comparison(json.loads((tmp_path / "out" / "comparison.json").read_text())))
    rows = [line.split() for line in console.export_text().splitlines() if line.split()[:1] == ["all"]]
    assert [row[:4] for row in rows] == [["all", "75.0", "50.0", "25.0"], ["all", "50.0", "50.0", "0.0"]]
    assert [row[-4:] for row in rows] == [["1", "0", "3", "1.000"], ["1", "1", "2", "1.000"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "eval needs --config FILE; or --run-dir DIR --against DIR"),
        (["--run-dir", "RUN"], "eval needs --config FILE; or --run-dir DIR --against DIR"),
        (["--run-dir", "RUN", "--against", "RUN", "train.seed=1"], "train.seed=1 changes a configuration; give one"),
        (["--run-dir", "RUN", "--out", "RUN"], "--out is the folder of a comparison; say with what to compare"),
        (["--run-dir", "RUN", "--against", "NONE"], "NONE holds no finished evaluation"),
        (["--config", "CONFIG", "--run-dir", "x", "--against", "NONE"], "NONE holds no finished evaluation"),
        (["--run-dir", "RUN", "--against", "RUN", "--out", "CONFIG/x"], "--out: "),
    ],
)
def test_mistakes_of_the_command(tmp_path: Path, words: list[str], message: str) -> None:
    run = evaluation(tmp_path / "run", FIRST)
    places = {"RUN": run, "NONE": tmp_path / "NONE", "CONFIG": tmp_path / "config.yaml"}
    places["CONFIG/x"] = tmp_path / "config.yaml" / "x"
    refused = program("eval", *(places.get(word, word) for word in words)).refused()
    assert message in refused
