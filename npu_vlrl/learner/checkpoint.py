"""Checkpoints: the full state of a run, from which it resumes exactly, in files without code (safetensors and JSON).

    step-00000100/  state.json  rng.safetensors  weights.safetensors    optimizer.safetensors
                    SHA256SUMS            or     weights.0.safetensors  optimizer.0.safetensors
                                                 weights.1.safetensors  optimizer.1.safetensors

SHA256SUMS has the checksum of every other file, as `sha256sum -c` reads it; files are compared with it before loading.

Each rank of a sharded policy writes a file with its rows of every tensor, and their position in the full tensor in the
file's header, under `rows`. A reader takes the rows that it needs, from any number of files. (torch's DCP has the same
function, but reads its metadata by unpickling.)
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from npu_vlrl.common.atomic_files import set_permissions, sha256, write_text, writing
from npu_vlrl.learner.ranks import Ranks

Content = TypeVar("Content")
Tensors = TypeVar("Tensors", bound=Mapping[str, Tensor])
"""Tensors of a checkpoint: any mapping in one that is written, `Stored` in one that is read."""

STATE = "state.json"
SUMS = "SHA256SUMS"
ROWS = "rows"
_NAME = re.compile(r"step-(\d{8})$")
_SUM = re.compile(r"([0-9a-f]{64})  ([\w.]+)")
_TEXT_BYTES = 1024
"""Size of the buffer in which a rank sends the checksums of its files to rank 0."""


class CheckpointError(ValueError):
    """A checkpoint does not fit the run; the message names the file and the difference."""


@dataclass(frozen=True)
class Checkpoint(Generic[Tensors]):
    step: int
    """Number of steps done."""
    weights: Tensors
    optimizer: Tensors
    """Tensors `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`; `master.<parameter>` for 16 bits."""
    rng: dict[str, Tensor]
    state: dict[str, Any]
    """JSON values: data cursor, scheduler, weight version …"""
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Rows of each tensor of which this rank has a shard: the first row, and the number of rows of the full tensor."""


def save(folder: Path, checkpoint: Checkpoint[dict[str, Tensor]], keep: int, ranks: Ranks | None = None) -> Path:
    """Writes `folder/step-XXXXXXXX` atomically: a run that is killed here leaves the previous checkpoint intact.

    A complete checkpoint of the same step has the same content and is kept. Older checkpoints beyond `keep`, and
    unfinished ones of killed runs, are removed. Several `ranks` with shards call it at the same time, with a folder
    that all see. Raises OSError with the name of the file when the disk is full.
    """
    ranks = ranks or Ranks()
    final = folder / f"step-{checkpoint.step:08d}"
    if ranks.broadcast_flag(final in complete(folder)):
        return final
    partial = folder / f".{final.name}.partial"
    if ranks.rank == 0:
        for left in (*folder.glob(".step-*.partial"), final):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.meet()
    sums = _gather(_write(partial, checkpoint, ranks), ranks)
    if ranks.rank == 0:
        state = partial / STATE
        write_text(state, json.dumps({"step": checkpoint.step, **checkpoint.state}, indent=2))
        _flush(state)
        sums[STATE] = sha256(state)
        write_text(partial / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        _flush(partial / SUMS)
        _flush(partial)
        partial.rename(final)
        _flush(folder)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old)
    ranks.meet()
    return final


def _write(partial: Path, checkpoint: Checkpoint[dict[str, Tensor]], ranks: Ranks) -> dict[str, str]:
    """Writes the tensors of this rank, and in rank 0 those that all ranks have; returns the files' checksums."""
    sums = {}
    for name in ("weights", "optimizer", "rng"):
        tensors: dict[str, Tensor] = getattr(checkpoint, name)
        rows = {key: place for key, place in checkpoint.rows.items() if key in tensors}
        held = {key: t.detach().cpu().contiguous() for key, t in tensors.items() if key in rows or not ranks.rank}
        if held or not ranks.rank:
            file = partial / (f"{name}.{ranks.rank}.safetensors" if rows else f"{name}.safetensors")
            with writing(file):
                save_file(held, file, {ROWS: json.dumps(rows)} if rows else None)
                set_permissions(file)
                _flush(file)
                sums[file.name] = sha256(file)
    return sums


def _gather(sums: dict[str, str], ranks: Ranks) -> dict[str, str]:
    """The checksums of all ranks' files; returns when every rank has written."""
    text = json.dumps(sums).encode().ljust(_TEXT_BYTES)
    found = ranks.gather(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return {name: digest for said in found for name, digest in json.loads(bytes(said.tolist())).items()}


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None.

    Raises CheckpointError for a newer one without STATE: it was complete once, so a run that resumed from an older one
    would repeat steps.
    """
    found = complete(folder)
    newest = found[-1].name if found else ""
    for path in sorted(folder.glob("step-*"), reverse=True):
        if _NAME.match(path.name) and path.is_dir() and path.name > newest:
            raise CheckpointError(f"checkpoint file {path / STATE} is missing; {remedy(path)}")
    return found[-1] if found else None


def steps_done(folder: Path) -> int:
    """Number of steps of the newest complete checkpoint; 0 without one."""
    newest = latest(folder)
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


class Stored(Mapping[str, Tensor]):
    """Tensors of the files of one name, on the host; each is read when it is accessed."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises CheckpointError when a file is missing or damaged, naming it."""
        self._path = path
        self._pieces: dict[str, list[tuple[int, Any]]] = {}
        """Pieces of each tensor: the first row of a piece, and its file."""
        self._totals: dict[str, int] = {}
        """Number of rows of each tensor that is in pieces."""
        for file in sorted(path.glob(f"{name}.*.safetensors")) or [path / f"{name}.safetensors"]:
            opened, rows = _read(file, _opened)
            for key in opened.keys():  # noqa: SIM118  # it is no mapping
                first = 0
                if key in rows:
                    first, self._totals[key] = rows[key]
                self._pieces.setdefault(key, []).append((first, opened))

    def __getitem__(self, key: str) -> Tensor:
        return self.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def shape(self, key: str) -> list[int]:
        """Shape of the full tensor."""
        shape: list[int] = self._pieces[key][0][1].get_slice(key).get_shape()
        return [self._totals[key], *shape[1:]] if key in self._totals else shape

    def dtype(self, key: str) -> str:
        """Dtype as safetensors names it, e.g. `F32`; several names where pieces differ."""
        return " and ".join(sorted({file.get_slice(key).get_dtype() for _, file in self._pieces[key]}))

    def read(self, key: str, rows: range | None = None) -> Tensor:
        """Reads a full tensor, or some rows of it. Raises CheckpointError when they are in no file."""
        pieces = self._pieces[key]
        if rows is None and key not in self._totals:
            tensor: Tensor = pieces[0][1].get_tensor(key)
            return tensor
        rows = range(self._totals[key]) if rows is None else rows
        found = []
        for first, file in pieces:
            piece = file.get_slice(key)
            start, stop = max(rows.start - first, 0), min(rows.stop - first, piece.get_shape()[0])
            if start < stop:
                found.append(piece[start:stop])
        if sum(map(len, found)) != len(rows):
            raise CheckpointError(f"checkpoint {self._path} has no file with some rows of {key}; {remedy(self._path)}")
        return torch.cat(found) if found else torch.empty(0, *self.shape(key)[1:])


def _opened(file: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Opens a file of tensors; also returns the rows of those that are in pieces."""
    opened = safe_open(file, "pt")
    return opened, dict(json.loads((opened.metadata() or {}).get(ROWS, "{}")))  # type: ignore[no-untyped-call]


def load(path: Path, ranks: Ranks | None = None) -> Checkpoint[Stored]:
    """Loads a checkpoint. Weights and optimiser are read when they are accessed, see `Stored`. Several `ranks` that
    load the same checkpoint share the comparison of files with checksums. Raises CheckpointError when a file is missing
    or damaged, naming it.
    """
    verify(path, ranks or Ranks())
    state = _read(path / STATE, lambda file: dict(json.loads(file.read_text())))
    weights, optimizer = Stored(path, "weights"), Stored(path, "optimizer")
    rng = _read(path / "rng.safetensors", load_file)
    match = _NAME.match(path.name)
    if match is None or state.pop("step", None) != int(match[1]):
        raise CheckpointError(f"checkpoint {path / STATE} is not that of the step in the folder's name")
    return Checkpoint(int(match[1]), weights, optimizer, rng, state)


def has_checksums(path: Path) -> bool:
    """Whether the checkpoint lists checksums; earlier releases wrote none."""
    return (path / SUMS).is_file()


def verify(path: Path, ranks: Ranks) -> None:
    """Compares this rank's share of the files with their checksums, where there are any. Raises CheckpointError."""
    if not has_checksums(path):
        return
    lines = _read(path / SUMS, lambda file: file.read_text().splitlines())
    found = [_SUM.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in found if match is not None}
    if len(sums) < len(lines) or STATE not in sums:
        raise CheckpointError(f"checkpoint file {path / SUMS} is damaged: no list of checksums; {remedy(path)}")
    for file in path.glob("*.safetensors"):
        if file.name not in sums:
            raise CheckpointError(f"checkpoint file {file} was not written with the others; move it away")
    for name in sorted(sums)[ranks.rank :: ranks.size]:
        if _read(path / name, sha256) != sums[name]:
            raise CheckpointError(
                f"checkpoint file {path / name} is damaged: its checksum is not the one in {SUMS}; {remedy(path)}"
            )


def remedy(path: Path) -> str:
    """Remedy for a checkpoint that cannot be used."""
    older = [other for other in complete(path.parent) if other.name < path.name]
    where = f"from {older[-1].name}" if older else "from the beginning, since there is no older one"
    return f"put back what was written, or remove {path} to go on {where}"


def _read(file: Path, read: Callable[[Path], Content]) -> Content:
    try:
        return read(file)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {file} cannot be read: {error}; {remedy(file.parent)}") from error


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, the oldest first."""
    return sorted(p for p in folder.glob("step-*") if _NAME.match(p.name) and (p / STATE).is_file())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
