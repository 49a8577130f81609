"""Trainings that sample with the real vLLM on GPUs; every step compares vLLM with the learner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.vllm.test_vllm_training import train, versions

NEAR = 0.1
"""Nats between vLLM and the learner, both in bfloat16."""

WORDS = ("model.dtype=bfloat16", "algorithm.entropy_coef=0.01", "optim.lr=0.02", "warm_start.lr=0.02")
"""Answers that earn the same teach nothing, but entropy has a gradient. Each step moves a weight by a fifth of its
size: a vLLM that missed one would be nats away.
"""

ADAPTER = ("model.lora.rank=8", "warm_start.steps=0")

ONE_DEVICE = {
    "one process": (1, ()),
    "sleep": (1, ("rollout.sleep=true", "rollout.graphs=false")),
    "adapter": (1, ADAPTER),
    "adapter, in turns": (1, (*ADAPTER, "rollout.sleep=true", "rollout.graphs=false")),
}
TWO_DEVICES = {
    "engine process": (2, ("rollout.graphs=false",)),
    "split over two": (1, ("rollout.tensor_parallel=2", "rollout.graphs=false")),
    "beside two learners": (2, ("train.learners=all", "train.shard=true", "rollout.graphs=false")),
    "beside two, in turns": (2, ("train.learners=all", "rollout.sleep=true", "rollout.graphs=false")),
    "asynchronous": (2, ("train.staleness=1", "algorithm.correction=tis", "rollout.graphs=false")),
}
CASES = ONE_DEVICE | (TWO_DEVICES if torch.cuda.device_count() > 1 else {})


@pytest.mark.parametrize("case", CASES)
def test_vllm_samples_with_the_weights_of_the_learner(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cuda")
    processes, words = CASES[case]
    lines = train(tmp_path / "run", "vllm", *WORDS, *words, processes=processes)
    steps = [line for line in lines if "gap_max" in line]
    assert len(steps) == 3
    assert all(line["gap_max"] < NEAR and line["sync/bytes"] > 0 for line in steps)
    assert all(line["grad_norm"] > 0 for line in steps)
    if case != "asynchronous":
        assert versions(tmp_path / "run") == {0: {0}, 1: {1}, 2: {2}}
