"""Key-value caches as plain tensors: one a row between turns, one batch while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from npu_vlrl.types import ImageInput


@dataclass
class RowCache:
    """What a finished turn leaves behind."""

    token_ids: tuple[int, ...]
    """The tokens whose keys and values are held."""
    kv: Tensor
    """[2 * layers, heads, tokens, head size]; keys and values alternate."""
    images: tuple[ImageInput, ...]
    """The pictures behind the placeholders among them."""


class BatchCache:
    """A transformers cache of many rows with the mask of its valid columns."""

    def __init__(self, rows: Sequence[RowCache | None], device: torch.device) -> None:
        """Rows of different length are padded on the left; None is an empty row."""
        self.cache = DynamicCache()
        longest = max((len(row.token_ids) for row in rows if row is not None), default=0)
        self.valid_BK = torch.zeros(len(rows), longest, dtype=torch.bool, device=device)
        if longest == 0:
            return
        sample = next(row.kv for row in rows if row is not None)
        stacked = sample.new_zeros(sample.shape[0], len(rows), sample.shape[1], longest, sample.shape[3])
        for index, row in enumerate(rows):
            if row is not None:
                length = len(row.token_ids)
                stacked[:, index, :, longest - length :] = row.kv
                self.valid_BK[index, longest - length :] = True
        for layer in range(len(stacked) // 2):
            self.cache.update(stacked[2 * layer], stacked[2 * layer + 1], layer)

    def mask_for(self, valid_BQ: Tensor) -> Tensor:
        """Grows the valid columns by the coming ones; returns bool [B, Q, K]: which key each query may attend."""
        past = self.valid_BK.shape[1]
        self.valid_BK = torch.cat([self.valid_BK, valid_BQ], dim=1)
        queries = torch.arange(past, self.valid_BK.shape[1], device=valid_BQ.device)
        causal = torch.arange(self.valid_BK.shape[1], device=valid_BQ.device) <= queries[:, None]
        return self.valid_BK[:, None] & causal

    def select(self, rows_B: Tensor) -> None:
        """Keeps (or repeats) the given rows."""
        self.cache.batch_select_indices(rows_B)
        self.valid_BK = self.valid_BK[rows_B]

    def row(self, index: int, token_ids: tuple[int, ...], images: tuple[ImageInput, ...]) -> RowCache:
        """A copy of one row without its padding."""
        columns = self.valid_BK[index].nonzero()[:, 0]
        layers: Any = self.cache.layers
        parts = [t[index].index_select(1, columns) for layer in layers for t in (layer.keys, layer.values)]
        assert len(columns) == len(token_ids)
        return RowCache(token_ids, torch.stack(parts), images)
