"""The comparison of estimates with measurements runs, and the estimate gets the micro-batches that the learner has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import estimate, setup, update_step
from npu_vlrl import kernels
from npu_vlrl.kernels import table


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    before = table._platform
    yield
    kernels.use(before)


def test_each_kind_of_case_gives_a_row(tmp_path: Path) -> None:
    names = ("frozen tower, checkpointing, KL reference", "LoRA of Qwen3-VL-8B, no checkpointing", "rollout")
    estimate.main(["--size", "tiny", "--repeats", "1", "--out", str(tmp_path / "e.json"), "--cases", *names])
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert [row["case"] for row in rows] == list(names)
    assert all(row["estimate, GiB"] > 0 and row["measured, s"] > 0 and row["measured, GiB"] is None for row in rows)


def test_the_micro_batches_are_those_of_the_learner() -> None:
    model = setup.model("tiny", torch.device("cpu"), torch.float32)
    samples = update_step.rollouts(model, update_step.SHAPES["tiny"], 3, 3)
    work = estimate.micro_batches(samples, 128, model.policy)
    metrics = update_step.update(update_step.learner(model, 128), samples)
    assert len(work) == metrics["update/micro_batches"] > 1
    assert sum(one.tokens for one in work) == metrics["update/tokens_computed"]
    assert sum(one.scored for one in work) == sum(sample.n_scored for sample in samples)
    assert sum(len(one.images) for one in work) == metrics["update/images_encoded"]
