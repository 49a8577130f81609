"""Reads tensors of other programs' files, one at a time, without running code from a file.

Safetensors hold bytes and shapes. Torch files are read only as far as `torch.load` accepts them with
`weights_only=True`: it builds tensors and plain containers and refuses everything else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from npu_vlrl.learner.checkpoint import CheckpointError

TORCH = (".pt", ".pth", ".bin")
PARTS = "DCP_SHARDING_INFO"
"""Entry in the header of a file: position of its parts in the whole tensors (torch's HuggingFaceStorageWriter)."""


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """Reads the tensors of a file, or of all safetensors of a folder, or of the one torch file in it.

    Raises CheckpointError for a file that cannot be read without running code, with the command that makes it readable.
    """
    if path.is_dir():
        if (path / ".metadata").exists() or any(path.glob("*.distcp")):
            raise CheckpointError(
                f"{path} is a distributed checkpoint of torch (DCP), which keeps its metadata as a pickle; reading a "
                "pickle can run code of whoever made it, so it is not read here. If you trust it, run `python -m "
                f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt` and export weights.pt"
            )
        files = sorted(path.glob("*.safetensors"))
        if files:
            return Pieces(files)
        files = [file for file in path.iterdir() if file.suffix in TORCH]
        if len(files) != 1:
            raise CheckpointError(f"{path} holds neither .safetensors files nor one file of torch ({', '.join(TORCH)})")
        (path,) = files
    if path.suffix == ".safetensors":
        return Pieces([path])
    if path.suffix in TORCH and path.is_file():
        return dict(_flat(_read_torch(path), ""))
    raise CheckpointError(f"{path} is no checkpoint: give a folder, a .safetensors file, or a file of torch")


class Pieces(Mapping[str, Tensor]):
    """Tensors of safetensors files, on the host. A tensor may lie in parts in several files."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises CheckpointError when a file is damaged."""
        self._parts: dict[str, list[tuple[list[int], Any]]] = {}
        """Parts of each tensor: the beginning along each dimension, and the file."""
        for file in files:
            try:
                opened = safe_open(file, "pt")
                places = json.loads((opened.metadata() or {}).get(PARTS, "{}"))  # type: ignore[no-untyped-call]
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
            for name in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118  # it is no mapping
                dimensions = len(opened.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
                begin = places[name]["saved_offsets"] if name in places else [0] * dimensions
                self._parts.setdefault(name, []).append((begin, opened))

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError when a part is in no file."""
        parts: list[tuple[list[int], Tensor]] = [(begin, file.get_tensor(name)) for begin, file in self._parts[name]]
        if len(parts) == 1 and not any(parts[0][0]):
            return parts[0][1]
        ends = [[start + size for start, size in zip(begin, part.shape, strict=True)] for begin, part in parts]
        shape = [max(sizes) for sizes in zip(*ends, strict=True)]
        if sum(part.numel() for _, part in parts) != math.prod(shape):
            raise CheckpointError(f"parts of {name} are in no file, or in two; copy all files of the checkpoint")
        whole = torch.empty(shape, dtype=parts[0][1].dtype)
        for (begin, part), end in zip(parts, ends, strict=True):
            whole[tuple(slice(*edges) for edges in zip(begin, end, strict=True))] = part
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _read_torch(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # its own, zip's, and that of the pickles which it refuses
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file} cannot be read as tensors alone ({reason}); reading more than tensors can run code of whoever "
            "made the file. If you trust it, write its tensors anew, as docs/export.md shows"
        ) from error


def _flat(values: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested mappings, by the keys that lead to them."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from _flat(value, f"{prefix}{key}.")
