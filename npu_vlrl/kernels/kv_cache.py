"""KV cache with fixed addresses, so that decode steps can be captured as graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheRows:
    """Layout of one forward pass: its packed tokens continue B rows of the KV cache.

    Nothing here waits for the device, so a pass can be captured as a graph; only `lengths_B` changes between passes.
    """

    lengths_B: Tensor
    """int32: number of tokens of each row, including the new ones, which are the last."""
    starts_q: Tensor
    """int32 [B + 1]: start of each row's new tokens, and the end."""
    starts_k: Tensor
    """int32 [B + 1]: start of each row's slots, and the end."""
    cu_q: tuple[int, ...]
    """The numbers of `starts_q`, on the host."""
    longest: int
    """Upper bound of the rows' lengths."""
    lengths: tuple[int, ...] = ()
    """The numbers of `lengths_B`, on the host; empty where the host does not know them, as between decode steps."""

    @classmethod
    def of(
        cls, lengths_B: Tensor, news: Sequence[int], room: int, longest: int, lengths: Sequence[int] = ()
    ) -> CacheRows:
        """Makes the layout. `news`: number of new tokens of each row, at least one; `room`: slots of a row."""
        assert len(news) == len(lengths_B) and min(news) > 0 and longest <= room
        cu_q = [0]
        for new in news:
            cu_q.append(cu_q[-1] + new)
        starts = (cu_q, [row * room for row in range(len(news) + 1)])
        starts_q, starts_k = (torch.tensor(one, dtype=torch.int32, device=lengths_B.device) for one in starts)
        return cls(lengths_B, starts_q, starts_k, tuple(cu_q), longest, tuple(lengths))

    def slots(self) -> Tensor:
        """int64 [T]: the slot of each new token among all slots of all rows."""
        n_tokens = self.cu_q[-1]
        first_B = self.starts_k[:-1] + self.lengths_B - self.starts_q.diff() - self.starts_q[:-1]
        if n_tokens == len(self.lengths_B):
            rows = first_B
        else:
            rows = first_B.repeat_interleave(self.starts_q.diff(), output_size=n_tokens)
        return rows.long() + torch.arange(n_tokens, device=rows.device)


@dataclass(frozen=True)
class KVCache:
    """The KV cache of all layers, with the layout of one forward pass."""

    keys: Sequence[Tensor]
    """Keys of each layer, [B, room, K, D]; the pass writes the keys of its tokens into them."""
    values: Sequence[Tensor]
    rows: CacheRows
    slots_T: Tensor
    """Result of `rows.slots()`, computed once for all layers."""

    def write(self, layer: int, k_KTD: Tensor, v_KTD: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new tokens' keys and values to their slots; returns keys and values of all rows, [B, room, K, D]
        each.
        """
        keys, values = self.keys[layer], self.values[layer]
        for kept, new in ((keys, k_KTD), (values, v_KTD)):
            kept.flatten(0, 1).index_copy_(0, self.slots_T, new.transpose(0, 1))
        return keys, values
