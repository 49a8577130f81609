"""An evaluation: several answers to each task; one that was stopped anywhere and goes on is the one without a stop."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from npu_vlrl.config import ConfigError
from npu_vlrl.tasks.benchmark.convert import convert
from npu_vlrl.train_loop import train
from npu_vlrl.training import evaluation
from npu_vlrl.training.evaluate import evaluate
from npu_vlrl.training.evaluation import Evaluation
from npu_vlrl.workflow.environments.visual_qa import VisualQA
from tests.support.program import parquet, png, row
from tests.support.runs import lines, small_config

torch.set_num_threads(1)

TASKS, ANSWERS = 5, 4
STEP = VisualQA.step
SCORES = {"/acc": 50.0, "/acc+": 0.0, "": 50.0}
"""Of MME, for one who always says yes: that is right for one of the two questions about an image."""
FILES = ("trajectories.jsonl", "evaluation.json", "metrics.jsonl")


class Stopped(BaseException):
    """As Ctrl-C does, it passes every `except Exception`."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks a batch: 2, 2 and 1."""
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    monkeypatch.setattr(evaluation, "BATCH", 2 * ANSWERS + 1)


def answers(folder: Path, **changes: Any) -> dict[str, float]:
    given = {"evaluation__tasks": TASKS, "evaluation__answers": ANSWERS, "evaluation__temperature": 1}
    return evaluate(small_config(folder, **{**given, **changes}))


def resume(folder: Path, **changes: Any) -> int:
    """Goes on, and returns how many batches were played."""
    original, played = Evaluation.play, []

    async def counted(self: Evaluation) -> Any:
        played.append(1)
        return await original(self)

    with mock.patch.object(Evaluation, "play", counted):
        answers(folder, run__if_exists="resume", **changes)
    return len(played)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_VLRL_PLATFORM", "cpu")
        patch.setattr(evaluation, "BATCH", 2 * ANSWERS + 1)
        answers(folder)
    return folder


def test_the_numbers_are_those_of_the_records(unbroken: Path) -> None:
    records = lines(unbroken, "trajectories.jsonl")
    assert [r["id"] for r in records[:5]] == [
        *(f"evaluation0.0/0/arrow/1000003/0/{member}" for member in range(ANSWERS)),
        "evaluation0.0/1/arrow/1000003/1/0",
    ]
    assert len(records) == TASKS * ANSWERS and records[-1]["group"] == "evaluation0.4/0/arrow/1000003/4"
    by_task = [records[i : i + ANSWERS] for i in range(0, len(records), ANSWERS)]
    solved = [sum(r["solved"] for r in members) for members in by_task]
    assert len(set(solved)) > 1, "the tasks differ, so that means can be told from each other"
    values = json.loads((unbroken / "evaluation.json").read_text())
    found = values["results"]["all"]
    for k in (1, 2, 4):
        expected = sum(1 - math.comb(ANSWERS - c, k) / math.comb(ANSWERS, k) for c in solved) / TASKS
        assert found[f"pass@{k}"]["mean"] == pytest.approx(expected)
    assert found["avg@4"]["mean"] == pytest.approx(sum(solved) / len(records)) == found["after_retries"]["mean"]
    first = sum(r["solved_first_try"] for r in records) / len(records)
    turns = sum(len(r["turns"]) for r in records) / len(records)
    assert [found[k]["mean"] for k in ("accuracy", "turns")] == pytest.approx([first, turns])
    assert all(found[k]["low"] <= found[k]["mean"] <= found[k]["high"] for k in found if k != "tasks")
    assert found["turns"]["low"] < found["turns"]["high"] and found["tasks"] == TASKS
    (metrics,) = lines(unbroken, "metrics.jsonl")
    assert metrics["step"] == 0 and metrics["eval/all/tasks"] == TASKS
    assert {name: metrics[f"eval/arrow/{name}"] for name in found if name != "tasks"} == pytest.approx(
        {name: found[name]["mean"] for name in found if name != "tasks"}
    )
    assert values["settings"]["answers"] == ANSWERS and list(values["results"]["image_size"]) == ["0² to 128² pixels"]
    assert values["tasks"][0]["image_pixels"] == 28 * 28  # the card that hides the arrow


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_stop_while_a_batch_is_played(batch: int, unbroken: Path, tmp_path: Path) -> None:
    original, calls = evaluation.play, []

    async def stopping(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == batch:
            raise Stopped
        return await original(*arguments)

    with mock.patch.object(evaluation, "play", stopping), pytest.raises(Stopped):
        answers(tmp_path / "run")
    assert not (tmp_path / "run" / "evaluation.json").exists()
    assert resume(tmp_path / "run") == 3 - (batch - 1)
    assert contents(tmp_path / "run") == contents(unbroken)


@pytest.mark.parametrize(("kept", "missing"), [(3, 3), (8, 2), (13, 2), (19, 1), (20, 0)])
def test_a_stop_while_a_batch_is_recorded(kept: int, missing: int, unbroken: Path, tmp_path: Path) -> None:
    """`kept` whole lines are there, and half of the next."""
    folder = tmp_path / "run"
    answers(folder, evaluation__tasks=1)
    for name in FILES:
        (folder / name).unlink()
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("  tasks: 1\n", f"  tasks: {TASKS}\n"))
    whole = (unbroken / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    cut = b"".join(whole[:kept]) + (whole[kept][: len(whole[kept]) // 2] if kept < len(whole) else b"")
    (folder / "trajectories.jsonl").write_bytes(cut)
    assert resume(folder) == missing
    assert contents(folder) == contents(unbroken)


def test_a_finished_one_is_only_counted_again(unbroken: Path) -> None:
    before = contents(unbroken)
    assert resume(unbroken) == 0 and contents(unbroken) == before


@pytest.mark.parametrize("key", ["answer", "turns", "error"])
def test_a_record_that_lacks_what_is_counted_is_refused(key: str, unbroken: Path) -> None:
    folder = unbroken.parent / key  # where the configuration's files are
    shutil.copytree(unbroken, folder)
    file = folder / "trajectories.jsonl"
    first, second, *rest = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    del second[key]
    file.write_text("".join(json.dumps(record) + "\n" for record in (first, second, *rest)), encoding="utf-8")
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=rf"run\.dir: {file} holds .*choose another run\.dir"):
        resume(folder)
    assert file.read_bytes() == before


def test_other_answers_would_be_noticed(unbroken: Path, tmp_path: Path) -> None:
    answers(tmp_path / "run", train__seed=1)
    assert all(contents(tmp_path / "run")[name] != contents(unbroken)[name] for name in FILES[:2])


@pytest.mark.parametrize("record_every", [1, 0])
def test_the_folder_of_a_training_is_refused(record_every: int, tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"run__record_every": record_every, "train__steps": 1, "warm_start__steps": 0}
    train(small_config(folder, **settings))
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="holds a training; choose another run.dir for the evaluation"):
        evaluate(small_config(folder, run__if_exists="resume", **settings))
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_other_data_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.parquet"
    parquet(data, [row(n) for n in range(3)])
    settings: dict[str, Any] = {"data__eval": {"path": str(data)}, "evaluation__tasks": 0}
    answers(tmp_path / "run", **settings)
    gold = {"style": "rule", "ground_truth": "down"}
    for changed in ([row(0), row(7), row(2)], [row(0), row(1, reward_model=gold), row(2)], [row(0), row(1)]):
        parquet(data, changed)
        before = (tmp_path / "run" / "trajectories.jsonl").read_bytes()
        with pytest.raises(ConfigError, match=r"data\.parquet changed since the run .*another run\.dir"):
            resume(tmp_path / "run", **settings)
        assert (tmp_path / "run" / "trajectories.jsonl").read_bytes() == before


def test_evaluations_of_a_training_count_the_same_way(tmp_path: Path) -> None:
    settings = {"evaluation__answers": 2, "evaluation__temperature": 1, "evaluation__tasks": 3}
    train(small_config(tmp_path / "run", train__steps=1, warm_start__steps=0, **settings))
    before, _, after = lines(tmp_path / "run", "metrics.jsonl")
    names = ["tasks", "accuracy", "after_retries", "reward", "turns", "failed", "judge_failed"]
    names += ["avg@2", "pass@1", "pass@2"]
    expected = ["step", *(f"eval/{source}/{name}" for source in ("arrow", "all") for name in names)]
    assert list(before) == list(after) == expected
    found = [r for r in lines(tmp_path / "run", "trajectories.jsonl") if r["id"].startswith("baseline0.0/")]
    pairs = [found[i : i + 2] for i in range(0, 6, 2)]
    assert before["eval/all/pass@2"] == pytest.approx(sum(any(r["solved"] for r in pair) for pair in pairs) / 3)


def test_several_greedy_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"evaluation\.answers=4 are all the same at evaluation\.temperature=0; set a"
    ):
        small_config(tmp_path / "run", evaluation__answers=4)
    given = {"evaluation__answers": 4, "evaluation__temperature": 0.5}
    assert small_config(tmp_path / "run", **given).evaluation.answers == 4


def test_a_benchmark_from_its_files_to_its_scores(tmp_path: Path) -> None:
    rows = [
        {"question_id": name, "image": {"bytes": png(seed=n)}, "question": "Is it?", "answer": answer, "category": kind}
        for n, (kind, name) in enumerate([("OCR", "1.png"), ("code_reasoning", "2.png")])
        for answer in ("Yes", "No")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mme.parquet")
    file, _ = convert("mme", tmp_path / "mme.parquet", tmp_path / "out", None, seed=0)
    settings = {"data__eval": {"path": str(file)}, "reward": {"rule": "benchmark"}, "evaluation__tasks": 0}
    original = Evaluation.play

    async def yes(self: Evaluation) -> Any:
        """A random model says nothing of use, so the judge is told that it said Yes."""
        with mock.patch.object(VisualQA, "step", lambda self, text, history: STEP(self, "Yes", history)):
            return await original(self)

    with mock.patch.object(Evaluation, "play", yes):
        answers(tmp_path / "run", workflow__max_turns=1, **settings)
    values = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    expected = {f"{kind}{name}": points for kind in ("OCR", "code_reasoning") for name, points in SCORES.items()}
    assert values["benchmarks"] == {"mme": {**expected, "perception": 50.0, "cognition": 50.0}}
    assert list(values["results"]["category"]) == ["OCR", "code_reasoning"]
    assert values["results"]["all"]["accuracy"] == {"mean": 0.5, "low": 0.0, "high": 1.0}
