"""Rotary positions, computed without any state of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_vlrl.types import ImageInput


def rotary_positions(
    token_ids: Sequence[int] | np.ndarray,
    images: Sequence[ImageInput],
    placeholder: int | None,
    merge_size: int,
    on_grid: bool = True,
) -> np.ndarray:
    """Positions int64 [3, T] (time, height, width) of one sequence. Without `on_grid` all tokens count like text.

    Text advances all three rows by one; an image spans its merged grid from the current position on, and the text
    after it continues at the largest position used plus one (Qwen2-VL, arXiv 2409.12191, section 2.1). A text-only
    model uses row 0.

    Raises ValueError when placeholders and images do not match.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    slots = np.flatnonzero(ids == placeholder) if placeholder is not None else np.empty(0, np.int64)
    if len(slots) != sum(image.n_tokens for image in images):
        raise ValueError(f"{len(slots)} placeholder tokens for images of {[image.n_tokens for image in images]} tokens")
    if not on_grid:
        return np.tile(np.arange(len(ids)), (3, 1))
    positions = np.empty((3, len(ids)), dtype=np.int64)
    cursor = done = used = 0
    for image in images:
        start = int(slots[used])
        positions[:, done:start] = cursor + np.arange(start - done)
        cursor += start - done
        time, height, width = image.grid[0], image.grid[1] // merge_size, image.grid[2] // merge_size
        positions[:, start : start + image.n_tokens] = cursor + np.indices((time, height, width)).reshape(3, -1)
        cursor += max(height, width)
        done = start + image.n_tokens
        used += image.n_tokens
    positions[:, done:] = cursor + np.arange(len(ids) - done)
    return positions
