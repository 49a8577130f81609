"""Everything a run needs to go on exactly where it stopped, in files that hold no code (safetensors and JSON)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STATE = "state.json"
_NAME = re.compile(r"step-(\d{8})$")


class CheckpointError(ValueError):
    """A checkpoint does not fit the run; the message names the file and the difference."""


@dataclass(frozen=True)
class Checkpoint:
    step: int
    """Steps done."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """`exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`"""
    rng: dict[str, Tensor]
    state: dict[str, Any]
    """JSON values: data cursor, scheduler, weight version …"""


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes `folder/step-XXXXXXXX` atomically: a run that is killed here leaves the previous checkpoint intact.

    Older checkpoints beyond `keep` are removed afterwards.
    """
    final = folder / f"step-{checkpoint.step:08d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ("weights", "optimizer", "rng"):
        tensors: Mapping[str, Tensor] = getattr(checkpoint, name)
        save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, partial / f"{name}.safetensors")
    (partial / STATE).write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}, indent=2))
    for path in partial.iterdir():
        _flush(path)
    _flush(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _flush(folder)
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(folder)
    return found[-1] if found else None


def load(path: Path, device: torch.device) -> Checkpoint:
    """Raises CheckpointError when a file is missing or damaged, naming it."""
    try:
        state = json.loads((path / STATE).read_text())
        tensors = {
            name: load_file(path / f"{name}.safetensors", device=str(device) if name != "rng" else "cpu")
            for name in ("weights", "optimizer", "rng")
        }
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}; remove it to use an older one") from error
    return Checkpoint(step=state.pop("step"), state=state, **tensors)


def _complete(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if _NAME.match(p.name) and (p / STATE).is_file())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
