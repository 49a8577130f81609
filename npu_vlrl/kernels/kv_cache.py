"""Keys and values that are kept between forward passes, at addresses that stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheRows:
    """How the tokens of one forward pass, packed one after the other, continue B rows of kept tokens.

    Nothing in here waits for the device, so a pass can be captured: what changes from pass to pass is `lengths_B`.
    """

    lengths_B: Tensor
    """int32: the tokens of each row, the new ones included, which are the last."""
    starts_q: Tensor
    """int32 [B + 1]: where the new tokens of each row begin, and the end."""
    starts_k: Tensor
    """int32 [B + 1]: where the room of each row begins, and the end."""
    cu_q: tuple[int, ...]
    """`starts_q`, on the host."""
    longest: int
    """No row is longer."""
    lengths: tuple[int, ...] = ()
    """`lengths_B`, on the host; empty where the host does not know them, as between steps of decoding."""

    @classmethod
    def of(
        cls, lengths_B: Tensor, news: Sequence[int], room: int, longest: int, lengths: Sequence[int] = ()
    ) -> CacheRows:
        """`news`: how many new tokens each row has, one at least; `room`: for how many tokens a row has places."""
        assert len(news) == len(lengths_B) and min(news) > 0 and longest <= room
        cu_q = [0]
        for new in news:
            cu_q.append(cu_q[-1] + new)
        starts = (cu_q, [row * room for row in range(len(news) + 1)])
        starts_q, starts_k = (torch.tensor(one, dtype=torch.int32, device=lengths_B.device) for one in starts)
        return cls(lengths_B, starts_q, starts_k, tuple(cu_q), longest, tuple(lengths))

    def slots(self) -> Tensor:
        """int64 [T]: the place of each new token among all places of all rows."""
        n_tokens = self.cu_q[-1]
        first_B = self.starts_k[:-1] + self.lengths_B - self.starts_q.diff() - self.starts_q[:-1]
        if n_tokens == len(self.lengths_B):
            rows = first_B
        else:
            rows = first_B.repeat_interleave(self.starts_q.diff(), output_size=n_tokens)
        return rows.long() + torch.arange(n_tokens, device=rows.device)


@dataclass(frozen=True)
class KVCache:
    """The keys and values of all layers, and the rows of one forward pass among them."""

    keys: Sequence[Tensor]
    """For each layer [B, room, K, D]; the pass writes those of its tokens into it."""
    values: Sequence[Tensor]
    rows: CacheRows
    slots_T: Tensor
    """`rows.slots()`, computed once for all layers."""

    def write(self, layer: int, k_KTD: Tensor, v_KTD: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the new tokens' keys and values in their places; returns those of all rows, [B, room, K, D] each."""
        keys, values = self.keys[layer], self.values[layer]
        for kept, new in ((keys, k_KTD), (values, v_KTD)):
            kept.flatten(0, 1).index_copy_(0, self.slots_T, new.transpose(0, 1))
        return keys, values
