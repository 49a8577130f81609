"""Saving and restoring a learner, and exporting its model as a Hugging Face folder."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from npu_vlrl.hardware import Platform
from npu_vlrl.learner import checkpoint
from npu_vlrl.learner.checkpoint import Checkpoint, CheckpointError
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq", "step")

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def save_learner(
    folder: Path, step: int, learner: Learner, platform: Platform, state: dict[str, Any], keep: int
) -> Path:
    """Writes a checkpoint with the trained weights, the optimiser, the random states and `state` (JSON values).

    Frozen weights are those of `model.path` and are not written. Vision features are forgotten, so that a run that goes
    on computes what a resumed one does, bit by bit.
    """
    learner.forget_features()
    trained = _trained(learner)
    moments = {
        f"{moment}.{name}": optimizer.state[p][moment]
        for name, (p, optimizer) in trained.items()
        for moment in MOMENTS
        if p in optimizer.state
    }
    content = Checkpoint(
        step,
        weights={name: p for name, (p, _) in trained.items()},
        optimizer=moments,
        rng={"torch": torch.get_rng_state(), "device": platform.rng_state()},
        state={"updates": learner.updates, "skipped": learner.skipped, **state},
    )
    return checkpoint.save(folder, content, keep)


def load_learner(path: Path, learner: Learner, platform: Platform) -> tuple[int, dict[str, Any]]:
    """Restores what `save_learner` wrote; returns (steps done, state).

    Raises CheckpointError when the checkpoint belongs to another model, naming what differs.
    """
    content = checkpoint.load(path, learner.policy.device)
    trained = _trained(learner)
    _check_names(path, content.weights, {name: p for name, (p, _) in trained.items()})
    for name, (parameter, optimizer) in trained.items():
        with torch.no_grad():
            parameter.copy_(content.weights[name])
        moments = {m: content.optimizer[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in content.optimizer}
        if moments:
            optimizer.state[parameter] = moments
    torch.set_rng_state(content.rng["torch"])
    platform.set_rng_state(content.rng["device"])
    learner.updates = content.state.pop("updates")
    learner.skipped = content.state.pop("skipped")
    return content.step, content.state


def export_model(policy: Policy, tokenizer: PreTrainedTokenizerBase, source: Path, target: Path) -> None:
    """Writes a Hugging Face folder that plain transformers loads: adapters merged, tokenizer and processor included.

    The folder appears whole or not at all.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = copy.deepcopy(policy.model).merge_and_unload() if policy.has_adapter else policy.base
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, partial / name)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _trained(learner: Learner) -> dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer]]:
    """Everything that is trained, by name, with the optimiser that steps it."""
    found: dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer]] = {
        name: (p, learner.optimizer) for name, p in learner.parameters.items()
    }
    if learner.critic is not None:
        found |= {name: (p, learner.critic.optimizer) for name, p in learner.critic.parameters.items()}
    return found


def _check_names(path: Path, saved: dict[str, Tensor], here: dict[str, torch.nn.Parameter]) -> None:
    if saved.keys() != here.keys():
        difference = sorted(saved.keys() ^ here.keys())
        raise CheckpointError(f"checkpoint {path} is of another model: {difference[:3]} … ({len(difference)} names)")
    for name, parameter in here.items():
        if saved[name].shape != parameter.shape:
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name} is {list(saved[name].shape)}, "
                f"here {list(parameter.shape)}"
            )
