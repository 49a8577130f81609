"""Prefix sharing: merges sequences into a tree in which each shared prefix occurs once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npu_vlrl.kernels.tree import Tree


@dataclass(frozen=True)
class Shared:
    """Merged sequences. T counts the distinct tokens."""

    places: tuple[np.ndarray, ...]
    """int64: for each sequence, the position in T of each of its tokens."""
    tree: Tree

    @property
    def n_tokens(self) -> int:
        return self.tree.bounds[-1]


def divide(sequences: Sequence[np.ndarray], max_tokens: int) -> list[list[int]]:
    """Splits sequences into parts of up to `max_tokens` distinct tokens, as indices: one pass in sorted order, in which
    neighbours share most. A longer sequence is alone.
    """
    parts: list[list[int]] = []
    size, before = 0, np.zeros(0, np.int64)
    for index in sorted(range(len(sequences)), key=lambda i: (_sortable(sequences[i]), i)):
        ids = sequences[index]
        added = len(ids) - common(before, ids)
        if parts and size + added <= max_tokens:
            parts[-1].append(index)
            size += added
        else:
            parts.append([index])
            size = len(ids)
        before = ids
    return parts


def share(sequences: Sequence[np.ndarray]) -> Shared:
    """Merges sequences. Equal leading values become one token: an image's placeholders must differ from those of
    another image.

    Every sequence needs at least one token. The result depends on the sequences and their order alone.
    """
    order = sorted(range(len(sequences)), key=lambda i: (_sortable(sequences[i]), i))
    places: list[np.ndarray] = [np.zeros(0, np.int64)] * len(sequences)
    starts: set[int] = set()
    last_seer = np.zeros(sum(map(len, sequences)), np.int64)
    total = 0
    before = path = np.zeros(0, np.int64)
    for index in order:
        ids = sequences[index]
        same = common(before, ids)
        own = np.arange(total, total + len(ids) - same)
        goes_on = 0 < same == len(before) and path[-1] == total - 1
        if len(own) and not goes_on:
            starts.add(total)
        if 0 < same < len(path) and path[same] == path[same - 1] + 1:
            starts.add(int(path[same]))  # the run branches here
        path = np.concatenate([path[:same], own])
        total += len(own)
        last_seer[path] = total
        places[index], before = path, ids
    firsts = tuple(sorted(starts))
    return Shared(tuple(places), Tree(firsts, tuple(last_seer[list(firsts)].tolist())))


def common(first: np.ndarray, second: np.ndarray) -> int:
    """Number of equal leading values."""
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return int(different[0]) if len(different) else n


def _sortable(values: np.ndarray) -> bytes:
    """Sort key of a sequence; sequences with a shared prefix are neighbours in its order."""
    return np.ascontiguousarray(values, dtype=">i8").tobytes()
