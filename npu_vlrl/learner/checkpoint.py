"""Everything a run needs to go on exactly where it stopped, in files that hold no code (safetensors and JSON)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

Content = TypeVar("Content")

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
    """`exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`; `master.<parameter>` for 16 bits"""
    rng: dict[str, Tensor]
    state: dict[str, Any]
    """JSON values: data cursor, scheduler, weight version …"""


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes `folder/step-XXXXXXXX` atomically: a run that is killed here leaves the previous checkpoint intact.

    A complete checkpoint of the same step holds the same already and is kept. Older checkpoints beyond `keep`, and what
    a killed run left unfinished, are removed.
    """
    final = folder / f"step-{checkpoint.step:08d}"
    if final in _complete(folder):
        return final
    for left in (*folder.glob(".step-*.partial"), final):
        shutil.rmtree(left, ignore_errors=True)
    partial = folder / f".{final.name}.partial"
    partial.mkdir(parents=True)
    for name in ("weights", "optimizer", "rng"):
        tensors: Mapping[str, Tensor] = getattr(checkpoint, name)
        save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, partial / f"{name}.safetensors")
    (partial / STATE).write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}, indent=2))
    for path in partial.iterdir():
        _flush(path)
    _flush(partial)
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
    state = _read(path / STATE, lambda file: dict(json.loads(file.read_text())))
    weights = _read(path / "weights.safetensors", lambda file: load_file(file, device=str(device)))
    optimizer = _read(path / "optimizer.safetensors", lambda file: load_file(file, device=str(device)))
    rng = _read(path / "rng.safetensors", load_file)
    match = _NAME.match(path.name)
    if match is None or state.pop("step", None) != int(match[1]):
        raise CheckpointError(f"checkpoint {path / STATE} is not that of the step in the folder's name")
    return Checkpoint(int(match[1]), weights, optimizer, rng, state)


def _read(file: Path, read: Callable[[Path], Content]) -> Content:
    try:
        return read(file)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint file {file} cannot be read: {error}; remove {file.parent} to go on from an older checkpoint"
        ) from error


def _complete(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if _NAME.match(p.name) and (p / STATE).is_file())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
