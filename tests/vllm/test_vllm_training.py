"""A training that samples with the real vLLM, as a user starts it; every step compares vLLM with the learner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.models import tiny_folder

ROOT = Path(__file__).parents[2]

WORDS = (
    "train.steps=3",
    "warm_start.steps=4",
    "rollout.groups=3",
    "rollout.group_size=2",
    "rollout.cache_mib=256",
    "evaluation.tasks=8",
    "run.checkpoint_every=1",
    "run.record_every=1",
)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1")


def train(folder: Path, engine: str, *words: str, processes: int = 1) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    model = f"model.path={tiny_folder('qwen2_5_vl', 128)}"
    command = [sys.executable, *(TORCHRUN if processes == 2 else ()), "-m", "npu_vlrl", "train"]
    command += ["--config", "configs/photo_tiny.yaml"]
    command += ["--run-dir", str(folder), model, f"rollout.engine={engine}", *WORDS, *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def versions(folder: Path) -> dict[int, set[int]]:
    """Of the sampled tokens of each training step."""
    found: dict[int, set[int]] = {}
    for line in (folder / "trajectories.jsonl").read_text().splitlines():
        record = json.loads(line)
        if not record["group"].startswith("step"):
            continue
        for turn in record["turns"]:
            found.setdefault(record["step"], set()).update(turn["action"]["weight_versions"])
    return found


def test_a_training_and_one_that_goes_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "vllm", "vllm")
    ours = train(tmp_path / "inprocess", "inprocess")
    steps = [line for line in whole if "gap_max" in line]
    assert len(steps) == 3
    assert all(0 < line["gap_max"] < 1e-4 and line["sync/bytes"] > 0 for line in steps)
    assert all(0 < line["probe_gap"] < 1e-4 and line["probe_tokens"] >= 16 for line in steps)
    # greedy, after the same warm start: the same episodes
    baselines = [next(line for line in lines if "eval/all/turns" in line) for lines in (whole, ours)]
    evaluated = [{key: value for key, value in line.items() if key.startswith("eval/")} for line in baselines]
    assert evaluated[0] == evaluated[1]
    assert versions(tmp_path / "vllm") == {0: {0}, 1: {1}, 2: {2}}

    more = train(tmp_path / "vllm", "vllm", "run.if_exists=resume", "train.steps=4")
    assert [line["gap_max"] < 1e-4 for line in more if "gap_max" in line] == [True] * 4
    assert versions(tmp_path / "vllm")[3] == {3}


def test_a_training_with_an_engine_process(tmp_path: Path) -> None:
    """The learner here, vLLM there, and the weights by files."""
    lines = train(tmp_path / "run", "vllm", "sync.through=disk", processes=2)
    steps = [line for line in lines if "gap_max" in line]
    assert len(steps) == 3
    assert all(0 < line["gap_max"] < 1e-4 and line["sync/bytes"] > 0 for line in steps)
    assert versions(tmp_path / "run") == {0: {0}, 1: {1}, 2: {2}}
    assert not (tmp_path / "run" / "weights").exists()  # the files are removed when the run ends


def test_a_training_of_two_that_learn_and_sample(tmp_path: Path) -> None:
    """Each has vLLM beside its learner, and a part of the weights; the entropy moves them."""
    words = ("train.learners=all", "train.shard=true", "algorithm.entropy_coef=0.01", "optim.lr=0.01")
    lines = train(tmp_path / "run", "vllm", *words, processes=2)
    steps = [line for line in lines if "gap_max" in line]
    assert len(steps) == 3
    assert all(0 < line["gap_max"] < 1e-4 and line["sync/bytes"] > 0 and line["grad_norm"] > 0 for line in steps)
    assert versions(tmp_path / "run") == {0: {0}, 1: {1}, 2: {2}}


def test_an_asynchronous_training_with_an_engine_process(tmp_path: Path) -> None:
    """vLLM is interrupted by new weights; the learner compares the tokens of the weights that it has."""
    words = ("train.staleness=1", "algorithm.correction=tis", "algorithm.entropy_coef=0.01", "optim.lr=0.01")
    lines = train(tmp_path / "run", "vllm", *words, processes=2)
    steps = [line for line in lines if "grad_norm" in line]
    assert len(steps) == 3
    assert all(0 < line["probe_gap"] < 1e-4 and line["probe_tokens"] >= 16 for line in steps)
    assert all(line.get("logprob_gap", 0) < 1e-4 and line["grad_norm"] > 0 for line in steps)
    assert all(line["async/staleness_max"] <= 1 for line in steps)
    records = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["group"].startswith("task")]
    assert len({record["group"] for record in trained}) == 9 and len(trained) == 18
    for record in trained:
        for turn in record["turns"]:
            found = turn["action"]["weight_versions"]
            assert found == sorted(found) and record["step"] - 1 <= found[0] and found[-1] <= record["step"]
