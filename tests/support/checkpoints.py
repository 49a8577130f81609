"""Checkpoints that a test has changed, and such as earlier releases wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def seal(path: Path) -> None:
    """Writes the checksums of the files as they are now."""
    files = sorted(file for file in path.iterdir() if file.name != "SHA256SUMS")
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (path / "SHA256SUMS").write_text("".join(lines))


def as_of_old(path: Path) -> None:
    """Takes away what earlier releases did not write."""
    (path / "SHA256SUMS").unlink()
    state = json.loads((path / "state.json").read_text())
    new = ("unstepped", "counters")
    (path / "state.json").write_text(json.dumps({key: value for key, value in state.items() if key not in new}))


def change(file: Path, new: Callable[[str, Tensor], Tensor | None]) -> None:
    """Replaces each tensor of a file; None removes it."""
    changed = {name: new(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}, file)
