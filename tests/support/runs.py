"""Whole trainings small enough for tests, and what they left in their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from npu_vlrl.config import Config, load_config
from npu_vlrl.train_loop import train
from tests.support.learning import tiny_folder

REWARD = """
def score(task, text, history, images):
    return {"reward": len(text) % 5 / 4, "solved": len(text) % 5 == 4}
"""
"""A random model never answers right, but some of its answers are longer than others."""

SETTINGS = """
train: {threads: 1, steps: 4}
data:
  train: {generator: arrow}
workflow:
  {tools: [look], describe_tools: false, max_turns: 2, turn_tokens: 12, context_tokens: 160, turn_discount: 0.5,
   reward_mode: sum, feedback: No. Try again.}
rollout: {groups: 2, group_size: 2}
algorithm: {kl_coef: 0.05, aggregation: token-mean}
optim: {lr: 1.0e-2, warmup_steps: 2}
warm_start: {steps: 2, batch: 4}
evaluation: {tasks: 2}
run: {checkpoint_every: 1, show_every: 0}
"""

REPEATS = (
    "seconds",
    "rollout_seconds",
    "sampled_tokens_per_second",
    "trajectories_per_second",
    "peak_memory_gib",
    "images_referenced",
    "images_encoded",
    "learner/tokens_referenced",
    "learner/tokens_computed",
    "update/seconds",
    "update/useful_tokens_per_second",
    "update/computed_tokens_per_second",
    "update/mfu",
)
"""Of metrics.jsonl: clocks, memory and counters of the process; all else is the same in a resumed run."""


def write_config(folder: Path) -> Path:
    """A configuration file, and a reward beside it."""
    (folder / "reward.py").write_text(REWARD)
    rest = {"model": {"path": str(tiny_folder())}, "reward": {"rule": f"{folder / 'reward.py'}:score"}}
    file = folder / "small.yaml"
    file.write_text(SETTINGS + "\n".join(f"{section}: {json.dumps(values)}" for section, values in rest.items()))
    return file


def small_config(run_dir: Path, **changes: Any) -> Config:
    """`changes` are written as `train__steps=3`."""
    given = {"run.dir": run_dir, **{key.replace("__", "."): value for key, value in changes.items()}}
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in given.items()]
    return load_config(write_config(run_dir.parent), overrides)


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k not in REPEATS and not k.startswith("engine/")}
        for line in lines(run_dir, "metrics.jsonl")
    ]


def exported_weights(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


def same_weights(first: Path, second: Path) -> bool:
    a, b = exported_weights(first), exported_weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train_alone(folder: Path, *words: str) -> Path:
    """The run folder of a training in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_VLRL_PLATFORM", "cpu")
        train(load_config(write_config(folder), [f"run.dir={folder / 'run'}", *words]))
    return folder / "run"
