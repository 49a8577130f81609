"""The whole program on real problems, and on every kind of model, in miniature."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from npu_vlrl.types import Image
from tests.support.program import SMALL, config_file, parquet, program, records, row

ROOT = Path(__file__).parents[2]
TINY = (
    "model.max_pixels=6272",
    "workflow.turn_tokens=6",
    "workflow.max_turns=2",
    "rollout.groups=4",
    "run.checkpoint_every=1",
    "train.threads=1",
    "train.seed=1",
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


def read_rows(file: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(file).to_pylist())


def test_geo3k_from_conversion_to_resume(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    converted = program("data", "geo3k", "--out", data)
    assert converted.code == 0
    files = {name: read_rows(data / f"{name}.parquet") for name in ("train", "test")}
    assert f"train: {len(files['train'])}\ntest: {len(files['test'])}\n" in converted.out
    assert "mathv_2830" in converted.out  # refused, by name
    paths = [f"data.train.path={data}/train.parquet", f"data.eval.path={data}/test.parquet"]
    command = ["train", "--config", ROOT / "configs/geo3k_tiny.yaml", "--run-dir", run, *paths, *TINY]

    done = program(*command, "train.steps=2")
    assert (done.code, done.err) == (0, "")
    assert "step 1 (2/2)" in done.out and f"run folder: {run}" in done.out
    assert "Put your final answer in \\\\boxed{}" in done.out  # the judge's feedback, in the sampled trajectory
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    first = records(run, "metrics.jsonl")

    again = program(*command, "train.steps=3", "run.if_exists=resume")
    assert (again.code, again.err) == (0, "")
    assert (
        "after 2 steps" in again.out and "step 2 (3/3)" in again.out and "baseline" not in again.out.split("before")[0]
    )
    metrics = records(run, "metrics.jsonl")
    assert metrics[: len(first) - 1] == first[:-1]  # all but the first run's final evaluation, which is repeated
    trained = [m for m in metrics if "loss" in m or "reward" in m]
    assert [m["step"] for m in trained] == [0, 1, 2]
    assert max(m["logprob_gap"] for m in trained) < 1e-4
    assert all(m["skipped_updates"] == 0 and m["grad_norm"] > 0 for m in trained if m["reward_std"] > 0)
    assert {m["skipped_records"] for m in trained} == {0}
    check_records(run, files)
    check_evaluation(metrics, files["test"])
    check_summary(run)


def check_records(run: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    """Real tasks with images of every mode were trained on, and every image named is there with its pixels."""
    episodes = records(run, "trajectories.jsonl")
    played = [episode for episode in episodes if episode["group"].startswith("step")]
    assert Counter(e["step"] for e in played) == {0: 8, 1: 8, 2: 8}
    assert len({e["task"] for e in played}) == 12  # no task twice within an epoch
    modes = {f"train/{r['extra_info']['id']}": r["extra_info"]["mode"] for r in files["train"]}
    assert {modes[e["task"]] for e in played} == set(modes.values()) == {"RGB", "RGBA"}
    answers = {f"train/{r['extra_info']['id']}": r["reward_model"]["ground_truth"] for r in files["train"]}
    assert all(e["answer"] == answers[e["task"]] for e in played)
    segments = [s for e in episodes for turn in e["turns"] for s in turn["new_context"]]
    named = {image["hash"] for segment in segments for image in segment.get("images", [])}
    assert named == {file.stem for file in (run / "images").iterdir()}
    for name in named:
        with Pillow.open(run / "images" / f"{name}.png") as image:
            assert Image(np.array(image)).hash == name
    for episode in played:
        assert [t["continues"] for t in episode["turns"]] == [True] * len(episode["turns"])
        assert {v for t in episode["turns"] for v in t["action"]["weight_versions"]} == {episode["step"]}


def check_evaluation(metrics: list[dict[str, Any]], test: list[dict[str, Any]]) -> None:
    counts = Counter(r["data_source"] for r in test)
    assert set(counts) == {"geometry3k", "math_vision", "mathverse"}
    evaluations = [m for m in metrics if "eval/all/tasks" in m]
    assert [m["step"] for m in evaluations] == [0, 3]
    for evaluation in evaluations:
        assert evaluation["eval/all/tasks"] == len(test)
        assert {s: evaluation[f"eval/{s}/tasks"] for s in counts} == dict(counts)
        assert evaluation["eval/all/failed"] == 0


def check_summary(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == {"baseline", "final", "steps", "train_seconds", "platform", "versions"}
    assert 0 <= summary["baseline"]["accuracy"] <= 1 and 0 <= summary["final"]["accuracy"] <= 1
    assert (summary["steps"], summary["platform"]) == (3, "cpu")
    assert summary["train_seconds"] > 0 and {"npu_vlrl", "torch", "transformers"} <= set(summary["versions"])


TEXT = {"prompt": [{"role": "user", "content": "Which way?"}], "images": []}


def test_a_text_model_is_the_case_without_images(tmp_path: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", [row(i, **({} if i == 2 else TEXT)) for i in range(4)])
    source = config_file(tmp_path, data={"train": {"path": str(file), "shuffle": False}})
    arguments = ["train", "--config", source, *SMALL, "model.path=tiny:qwen3", "workflow.max_turns=2"]
    done = program(*arguments, "rollout.groups=4", "--run-dir", tmp_path / "r")
    assert (done.code, done.err) == (0, "")
    (step,) = [m for m in records(tmp_path / "r", "metrics.jsonl") if "failed_groups" in m]
    assert (step["failed_groups"], step["images_encoded"]) == (1, 0) and step["logprob_gap"] < 1e-4
    assert "step 0: rows/2: chat template" in done.out and "text-only model" in done.out
    images = parquet(tmp_path / "images.parquet", [row(i) for i in range(4)])
    refused = program(*arguments, f"data.train.path={images}", "--run-dir", tmp_path / "q")
    assert refused.code == 1
    assert "choose a vision-language model or data without images" in refused.err


def test_qwen3_vl_looks_and_learns(tmp_path: Path) -> None:
    """With the quick start's settings: warm start, a tool that shows an image, GRPO against a reference."""
    settings = ["model.path=tiny:qwen3_vl", "data.train.generator=arrow", "train.threads=1", "train.steps=2"]
    sizes = ["warm_start.steps=2", "warm_start.batch=4", "rollout.groups=2", "evaluation.tasks=2"]
    command = ["train", "--config", ROOT / "configs/photo_tiny.yaml", "--run-dir", tmp_path / "r", *settings, *sizes]
    done = program(*command, "optim.lr=1e-3", "algorithm.max_logprob_gap=1e-3")
    assert (done.code, done.err) == (0, "")
    assert "warm start: 2 supervised steps on scripted demonstrations" in done.out
    steps = [m for m in records(tmp_path / "r", "metrics.jsonl") if "logprob_gap" in m]
    assert len(steps) == 2 and max(m["logprob_gap"] for m in steps) < 1e-4
    assert all(m["images_encoded"] > 0 for m in steps)
    tasks: dict[str, set[str]] = {}
    for episode in records(tmp_path / "r", "trajectories.jsonl"):
        tasks.setdefault(episode["group"].partition("/")[0].rstrip("0123456789."), set()).add(episode["task"])
    assert sorted(tasks) == ["baseline", "final", "step"]
    assert tasks["baseline"] == tasks["final"] and not tasks["final"] & tasks["step"]  # no task is trained on
    resumed = program(*command, "optim.lr=1e-3", "algorithm.max_logprob_gap=1e-3", "run.if_exists=resume")
    assert resumed.code == 0 and "after 2 steps" in resumed.out and "warm start:" not in resumed.out
