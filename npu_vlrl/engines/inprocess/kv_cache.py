"""KV cache of a batch, with fixed addresses, and KV cache of a session between its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_vlrl.kernels.kv_cache import CacheRows, KVCache
from npu_vlrl.model.policy import Policy
from npu_vlrl.types import ImageInput


@dataclass(frozen=True)
class CachedTurn:
    """KV cache of a finished turn."""

    token_ids: tuple[int, ...]
    """The tokens whose keys and values are cached."""
    kv_WTKD: Tensor
    """Keys of all layers, then the values; W = 2 * layers."""
    images: tuple[ImageInput, ...]
    """Images of the placeholders among the tokens."""

    @property
    def n_bytes(self) -> int:
        return self.kv_WTKD.numel() * self.kv_WTKD.element_size()


class KeyValues:
    """KV cache for `room` tokens in each of `rows` rows."""

    def __init__(self, policy: Policy, rows: int, room: int) -> None:
        self.room = room
        self.layers, heads, width = policy.kv_shape
        # zeros, since attention may weigh values beyond a row's length with zero, and they must not be NaN
        shape = (2 * self.layers, rows, room, heads, width)
        self.kv_WBLKD = torch.zeros(shape, dtype=policy.head_weight.dtype, device=policy.device)

    @staticmethod
    def bytes_per_token(policy: Policy) -> int:
        layers, heads, width = policy.kv_shape
        return 2 * layers * heads * width * policy.head_weight.element_size()

    def kept(self, rows: CacheRows, first: int = 0) -> KVCache:
        """KV cache of the rows from `first` on, as many as `rows` has, for a forward pass."""
        parts = self.kv_WBLKD[:, first : first + len(rows.lengths_B)].unbind(0)
        return KVCache(parts[: self.layers], parts[self.layers :], rows, rows.slots())

    def load(self, row: int, cache: CachedTurn) -> None:
        self.kv_WBLKD[:, row, : len(cache.token_ids)] = cache.kv_WTKD

    def save(self, row: int, token_ids: tuple[int, ...], images: tuple[ImageInput, ...]) -> CachedTurn:
        return CachedTurn(token_ids, self.kv_WBLKD[:, row, : len(token_ids)].clone(), images)

    def repeat(self, row: int, length: int, targets: Sequence[int]) -> None:
        """Copies the first `length` tokens of a row to other rows."""
        for target in targets:
            self.kv_WBLKD[:, target, :length] = self.kv_WBLKD[:, row, :length]

    def move(self, row: int, target: int) -> None:
        self.kv_WBLKD[:, target] = self.kv_WBLKD[:, row]
