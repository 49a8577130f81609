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
from npu_vlrl.learner.checkpoint import Checkpoint, CheckpointError, Stored
from npu_vlrl.learner.optimizer import divided, master
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MASTER = "master"

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

    Where the policy is divided over ranks all of them call it, and the first one's `state` is written.

    The masters of weights of 16 bits are part of the optimiser: a weight does not tell what it was rounded from.

    Frozen weights are those of `model.path` and are not written. Vision features are forgotten, so that a run that goes
    on computes what a resumed one does, bit by bit.
    """
    learner.forget_features()
    trained = trained_by(learner)
    stepped = {
        f"{moment}.{name}": optimizer.state[master(p)][moment]
        for name, (p, optimizer) in trained.items()
        for moment in MOMENTS
        if master(p) in optimizer.state
    }
    masters = {f"{MASTER}.{name}": master(p) for name, (p, _) in trained.items() if p.dtype.itemsize < 4}
    rows = {name: learner.ranks.rows(len(p)) for name, (p, _) in trained.items() if divided(master(p)) is not None}
    places = {name: (held.start, len(trained[name][0])) for name, held in rows.items()}
    content = Checkpoint(
        step,
        weights={name: master(p) if name in rows else p for name, (p, _) in trained.items()},
        optimizer=stepped | masters,
        rng={"torch": torch.get_rng_state(), "device": platform.rng_state()},
        state={"updates": learner.updates, "skipped": learner.skipped, **state},
        rows=places | {f"{m}.{name}": place for name, place in places.items() for m in MOMENTS if m != "step"},
    )
    return checkpoint.save(folder, content, keep, learner.ranks if learner.is_divided else None)


def load_learner(path: Path, learner: Learner, platform: Platform) -> tuple[int, dict[str, Any]]:
    """Restores what `save_learner` wrote; returns (steps done, state).

    The run that wrote it may have had weights of another dtype. Masters that it had none of begin as its weights. It
    may have divided its policy over any number of ranks, or not at all: each rank reads the rows that it holds.
    Raises CheckpointError when the checkpoint belongs to another model, naming what differs.
    """
    content = checkpoint.load(path)
    weights, moved = content.weights, content.optimizer
    trained = trained_by(learner)
    _check_names(path, weights, {name: p for name, (p, _) in trained.items()})
    for name, (parameter, optimizer) in trained.items():
        stepped = master(parameter)
        rows = None if divided(stepped) is None else learner.ranks.rows(len(parameter))
        with torch.no_grad():
            wide = f"{MASTER}.{name}"
            stepped.copy_(moved.read(wide, rows) if wide in moved else weights.read(name, rows))
            if rows is None:
                parameter.copy_(stepped)
        found = {m: f"{m}.{name}" for m in MOMENTS if f"{m}.{name}" in moved}
        moments = {m: _wide(moved.read(key, None if m == "step" else rows)) for m, key in found.items()}
        if moments:
            optimizer.state[stepped] = {m: moment.to(stepped.device) for m, moment in moments.items()}
    learner.publish()
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


def trained_by(learner: Learner) -> dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer]]:
    """Everything that is trained, by name, with the optimiser that steps it."""
    found: dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer]] = {
        name: (p, learner.optimizer) for name, p in learner.parameters.items()
    }
    if learner.critic is not None:
        found |= {name: (p, learner.critic.optimizer) for name, p in learner.critic.parameters.items()}
    return found


def _wide(moment: Tensor) -> Tensor:
    """In 16 bits they come from a run of the time before masters."""
    return moment.to(torch.promote_types(moment.dtype, torch.float32))


def _check_names(path: Path, saved: Stored, here: dict[str, torch.nn.Parameter]) -> None:
    if saved.keys() != here.keys():
        difference = sorted(saved.keys() ^ here.keys())
        raise CheckpointError(f"checkpoint {path} is of another model: {difference[:3]} … ({len(difference)} names)")
    for name, parameter in here.items():
        if saved.shape(name) != list(parameter.shape):
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name} is {saved.shape(name)}, here {list(parameter.shape)}"
            )
