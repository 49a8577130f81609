"""Whole trainings that sample with vllm-ascend, as a user starts them on NPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import host_cann
from tests.support.models import tiny_folder
from tests.support.ranks import ROOT
from tests.support.vllm_stage import HIDDEN
from tests.vllm.test_vllm_training import versions
from tests.vllm_ascend.stages import FITS, MAX_PIXELS

WORDS = (
    "model.dtype=bfloat16",
    f"model.max_pixels={MAX_PIXELS}",
    "train.steps=2",
    "rollout.groups=3",
    "rollout.group_size=2",
    "rollout.cache_mib=64",
    "evaluation.tasks=6",
    "run.checkpoint_every=0",
    "run.record_every=1",
    "optim.lr=1e-3",
)

pytestmark = pytest.mark.timeout(900)
"""Several processes, each of which imports vLLM; 300 s are for one."""

MOVED = ("algorithm.entropy_coef=0.05",)
"""Moves the weights where all answers of a group earn the same."""


def launched(folder: Path, devices: int, *words: str) -> list[dict[str, Any]]:
    """What `launch/train_npu.sh` trains on the stand-in, as a learner and an engine process."""
    variables = {"NPU_VLRL_PYTHON": sys.executable, "NPU_VLRL_HOST_CANN": "1", "NPU_VLRL_PROCESSES": "2"}
    return _metrics(folder, ["bash", "launch/train_npu.sh"], variables, devices, *words)


def in_one_process(folder: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "npu_vlrl", "train"]
    return _metrics(folder, command, {"NPU_VLRL_PLATFORM": "npu"}, 1, *words)


def _metrics(folder: Path, command: list[str], variables: dict[str, str], devices: int, *words: str) -> Any:
    """The lines of metrics.jsonl."""
    command = [*command, "--config", "configs/photo_tiny.yaml", "--run-dir", str(folder), *WORDS, *words]
    environment = os.environ | host_cann.environment(devices, host_cann.ROOMY_MIB) | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "grad_norm" in line]


def test_a_training_says_what_it_says_with_the_inprocess_engine(tmp_path: Path) -> None:
    """A learner and an engine process, whose vLLM splits the model over two devices and opens buckets on one of them.
    Both trainings begin with the weights of one warm start.
    """
    model = f"model.path={tiny_folder('qwen2_5_vl', HIDDEN)}"
    here = in_one_process(tmp_path / "here", model, "warm_start.steps=20", "warm_start.batch=4", *MOVED)
    warm = (f"model.path={tmp_path / 'here' / 'warm_start'}", "warm_start.steps=0")
    there = launched(tmp_path / "there", 3, "rollout.engine=vllm", "rollout.tensor_parallel=2", *warm, *MOVED)
    assert len(steps(there)) == len(steps(here)) == 2
    for ours, theirs in zip(steps(here), steps(there), strict=True):
        assert 0 < theirs["gap_max"] < FITS and 0 < theirs["probe_gap"] < FITS and theirs["probe_tokens"] >= 16
        assert theirs["sync/bytes"] > 0 and theirs["grad_norm"] > 0
        assert theirs["entropy"] == pytest.approx(ours["entropy"], rel=0.3)
        assert theirs["reward"] == pytest.approx(ours["reward"], abs=0.3)
    assert versions(tmp_path / "there") == {0: {0}, 1: {1}}
    # greedily, after the same warm start: nearly the same episodes
    baselines = [
        next(line["eval/all/reward"] for line in lines if "eval/all/reward" in line) for lines in (here, there)
    ]
    assert baselines[0] == pytest.approx(baselines[1], abs=0.2)


def test_an_asynchronous_training_of_an_adapter(tmp_path: Path) -> None:
    """vLLM is interrupted by new adapters; the learner compares the tokens of the weights that it has."""
    words = ("train.staleness=1", "algorithm.correction=tis", "model.lora.rank=4", "warm_start.steps=0", *MOVED)
    model = f"model.path={tiny_folder('qwen3_vl', HIDDEN)}"
    lines = launched(tmp_path / "run", 2, "rollout.engine=vllm", model, *words)
    found = steps(lines)
    assert len(found) == 2
    assert all(0 < line["probe_gap"] < FITS and line["grad_norm"] > 0 for line in found)
    assert all(line.get("logprob_gap", 0) < FITS and line["async/staleness_max"] <= 1 for line in found)
