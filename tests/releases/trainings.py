"""Trains tiny models and writes what a run leaves behind, or reads it and goes on; runs in any release of transformers.

`python -m tests.releases.trainings write FOLDER` and `python -m tests.releases.trainings read FOLDER OUT`. Both write a
file NAME.safetensors for each of `CASES`, the second below OUT, with the log-probabilities of the same samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from npu_vlrl.config import LoraConfig
from npu_vlrl.hardware import select
from npu_vlrl.learner.checkpoint import latest
from npu_vlrl.learner.state import load_learner, save_learner
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.tiny import write_tiny_model
from tests.support.learning import make_learner, samples_of
from tests.support.models import is_vision, load

LORA = {"lora": LoraConfig(rank=4, alpha=8.0)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_5_vl adapters": ("qwen2_5_vl", LORA),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl adapters": ("qwen3_vl", LORA),
    "qwen3": ("qwen3", {}),
}
"""A name, the kind of model and its settings."""
RATE = 1e-2
"""So that one update moves log-probabilities by much more than a change of release may."""


def logprobs(learner: Any, samples: list[Any]) -> Tensor:
    """Of all trained tokens, one sample after the other."""
    by_sample = learner.logprobs(samples, 1.0)
    return torch.cat([torch.from_numpy(by_sample[sample.id]) for sample in samples])


def write(root: Path, name: str) -> None:
    """The model, a checkpoint after two updates, its export, and what a third update makes of it."""
    kind, settings = CASES[name]
    loaded = load(write_tiny_model(kind, root / name / "model", seed=3), **settings)
    samples = samples_of(loaded, with_images=is_vision(kind))
    learner = make_learner(loaded, lr=RATE)
    found = {"model": logprobs(learner, samples)}
    for _ in range(2):
        learner.step(samples)
    save_learner(root / name / "checkpoints", 2, learner, select(), {}, keep=1)
    export_model(loaded, root / name / "export")
    found["checkpoint"] = logprobs(learner, samples)
    found["export"] = found["checkpoint"].clone()
    learner.step(samples)
    save_file(found | {"third": logprobs(learner, samples)}, root / f"{name}.safetensors")


def read(root: Path, name: str, out: Path) -> None:
    kind, settings = CASES[name]
    loaded = load(root / name / "model", **settings)
    samples = samples_of(loaded, with_images=is_vision(kind))
    learner = make_learner(loaded, lr=RATE)
    found = {"model": logprobs(learner, samples)}
    checkpoint = latest(root / name / "checkpoints")
    assert checkpoint is not None
    load_learner(checkpoint, learner, select())
    found["checkpoint"] = logprobs(learner, samples)
    learner.step(samples)
    found["third"] = logprobs(learner, samples)
    found["export"] = logprobs(make_learner(load(root / name / "export")), samples)
    save_file(found, out / f"{name}.safetensors")


def main(mode: str, root: str, *out: str) -> None:
    torch.set_num_threads(1)
    for name in CASES:
        if mode == "write":
            write(Path(root), name)
        else:
            read(Path(root), name, Path(*out))
    Path(*(out or (root,)), "release").write_text(transformers.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
