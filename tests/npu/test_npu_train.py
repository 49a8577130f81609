"""Whole trainings by torch_npu, on the stand-in, against the same trainings on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_vlrl import kernels
from npu_vlrl.config import load_config
from npu_vlrl.train_loop import train
from tests import host_cann
from tests.support.ranks import ROOT

torch.set_num_threads(1)

SETTINGS = (
    "train.steps=3",
    "warm_start.steps=60",
    "warm_start.batch=16",
    "rollout.groups=4",
    "optim.lr=1e-4",
    "evaluation.tasks=8",
    "run.show_every=0",
)
"""The quick start, made small. Its policy must be rather sure of its tokens: two that are equally likely are told apart
by rounding, and Adam makes a visible difference of the rounding of a gradient that is nearly zero.
"""

COMPARED = ("pg_loss", "kl", "entropy", "grad_norm", "reward", "turns", "tokens")
TOLERANCE = 1e-4

FUSED = {  # of each, forward and backward
    "aclnnFlashAttentionVarLenScore": "aclnnFlashAttentionUnpaddingScoreGrad",
    "aclnnRmsNorm": "aclnnRmsNormGrad",
    "aclnnRotaryPositionEmbedding": "aclnnRotaryPositionEmbeddingGrad",
    "aclnnSwiGlu": "aclnnSwiGluGrad",
}


@pytest.fixture(autouse=True)
def reference_kernels_afterwards() -> Iterator[None]:
    yield
    kernels.use("reference")


def here(platform: str, run: Path, *settings: str) -> list[dict[str, Any]]:
    """Trains in this process; returns the lines of its metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_VLRL_PLATFORM", platform)
        train(load_config(ROOT / "configs/photo_tiny.yaml", [*settings, f"run.dir={run}"]))
    return recorded(run)


def recorded(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    assert [line["step"] for line in one] == [line["step"] for line in other]
    return [
        f"step {a['step']}: {name} is {a[name]} and {b[name]}"
        for a, b in zip(one, other, strict=True)
        for name in COMPARED
        if name in a and not math.isclose(a[name], b[name], rel_tol=0, abs_tol=TOLERANCE)
    ]


def test_learner_and_engine_on_two_devices_train_as_one_process_on_the_cpu(tmp_path: Path) -> None:
    run = tmp_path / "npu"
    words = ["--config", "configs/photo_tiny.yaml", *SETTINGS, "--run-dir", str(run)]
    npu = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["-m", "npu_vlrl", "train", *words],
        cwd=ROOT,
        env={**os.environ, **host_cann.environment(), "NPU_VLRL_PLATFORM": "npu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert npu.returncode == 0, npu.stdout
    assert "npu: 2 x " in npu.stdout and "sampling in engine 1 (rank 1, " in npu.stdout
    there, cpu = recorded(run), here("cpu", tmp_path / "cpu", *SETTINGS)
    assert differences(cpu, there) == []
    steps = [line for line in cpu if "grad_norm" in line]
    assert len(steps) == 3 and all(abs(step["pg_loss"]) > 1e-3 and step["reward_std"] > 0.1 for step in steps)
    assert all(line["sync/bytes"] > 10**6 for line in there if "grad_norm" in line)
    moved = [{**line, "kl": line.get("kl", 0.0) + 2 * TOLERANCE} for line in there]
    assert len(differences(cpu, moved)) == 3  # the comparison can fail


def test_a_training_step_runs_on_the_device_by_fused_operators(tmp_path: Path) -> None:
    small = ("train.steps=1", "warm_start.steps=1", "warm_start.batch=4", "rollout.groups=2", "evaluation.tasks=2")
    with host_cann.counted() as ran:
        here("npu", tmp_path / "run", *small)
    assert on_the_host(ran) == []
    for forward, backward in FUSED.items():
        often = sum(count for name, count in ran.items() if name in (forward, f"{forward}V4"))
        assert often > ran[backward] > 0, (forward, ran)
    assert ran["aclnnFlashAttentionVarLenScoreV4"] > 0  # with the statistics that parts of a tree are merged by
    assert ran["aclnnFlashAttentionScore"] > 0  # sequences of one length, and the engine's decoding
    assert ran["aclnnApplyAdamWV2"] > 0
    with host_cann.counted() as ran:
        one = torch.ones(2, device="npu")
        torch.nextafter(one, 2 * one)
    assert on_the_host(ran) == ["fallback::nextafter"]  # the check can fail


def on_the_host(ran: Counter[str]) -> list[str]:
    return sorted(name for name in ran if name.startswith("fallback::"))
