"""Reference kernel of the attention for inference: prefill and decoding, over plain keys or blocks of a cache.

Computed in float32, one sequence at a time, as [N, S, D] (see attention.py). What the documents of
aclnnFusedInferAttentionScoreV2, V3 and V4 rule out on Atlas A2 is refused, and so is what has no reference: layouts
other than TND, BSND, BNSD and BSH, quantisation, shared prefixes, left padding, separate rotary parts, and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.host_cann.attention import COMPRESSED, LOWEST, TINY, _upper_triangle, grouped, require
from tests.host_cann.counting import count

LAYOUTS = ("TND", "BSND", "BNSD", "BSH")
DTYPES = (torch.float16, torch.bfloat16)
MASKS = (torch.bool, torch.int8, torch.uint8)
DEFAULT, ALL, LEFT_UP, RIGHT_DOWN = range(4)
MAX_HEADS, MAX_SHARING = 256, 64
MAX_D, MAX_D_PACKED = 512, 256
MAX_BATCH, MAX_SEQUENCES = 65536, 4096
MAX_KEYS_OF_ONE_QUERY = 262144
MAX_CACHE_WIDTH = 65535


class Sequence(NamedTuple):
    """One sequence: [N, S, D] views, and where its results go."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor | None
    """bool, broadcast to [N, S_q, S_kv]"""
    out: Tensor
    lse: Tensor | None
    """[N, S_q, 1]"""


@dataclass(frozen=True)
class Inference:
    """The arguments, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    lengths_q: list[int]
    """TND: where each sequence ends."""
    lengths_kv: list[int]
    """TND without blocks: where each sequence ends; else how many keys it has."""
    table: Tensor | None
    """[B, blocks of the longest sequence]: the blocks of each sequence, in order."""
    heads: int
    scale: float
    before: int
    after: int
    layout: str
    heads_kv: int
    sparse: int
    precise: int
    block_size: int

    def __post_init__(self) -> None:
        require(self.layout in LAYOUTS, f"input_layout {self.layout!r} has no reference; {', '.join(LAYOUTS)} have")
        dims = 3 if self.layout in ("TND", "BSH") else 4
        require(self.q.dim() == dims, f"layout {self.layout} needs a query of {dims} dimensions, not {self.q.dim()}")
        require(
            self.q.dtype == self.k.dtype == self.v.dtype and self.q.dtype in DTYPES,
            f"query, key and value must all be float16 or bfloat16, not {self.q.dtype}, {self.k.dtype}, {self.v.dtype}",
        )
        self._check_contiguous()
        require(
            self.k.shape == self.v.shape, f"key {list(self.k.shape)} and value {list(self.v.shape)} differ in shape"
        )
        self._check_heads()
        if self.table is not None:
            self._check_blocks()
        elif self.packed or self.layout == "BSH":
            require(self.k.dim() == 3, f"layout {self.layout} needs a key of 3 dimensions, not {self.k.dim()}")
        else:
            require(self.k.dim() == 4, f"layout {self.layout} needs a key of 4 dimensions, not {self.k.dim()}")
        self._check_packed() if self.packed else self._check_padded()
        self._check_mask()

    def _check_contiguous(self) -> None:
        """The documents want it of all. vllm-ascend's vision towers pass values that are not, on chips: CANN copies
        those, and `counted()` has "copied::value" for it. A cache in blocks would be copied whole."""
        for name, x in (("query", self.q), ("key", self.k), ("value", self.v), ("atten_mask", self.mask)):
            if x is None or x.is_contiguous():
                continue
            require(x is not self.mask and (self.table is None or x is self.q), f"{name} is not contiguous")
            count(f"copied::{name}")

    # --- shapes ---

    @property
    def packed(self) -> bool:
        return self.layout == "TND"

    @property
    def d(self) -> int:
        return self.q.shape[-1] // self.heads if self.layout == "BSH" else self.q.shape[-1]

    @property
    def batch(self) -> int:
        return len(self.lengths_q) if self.packed else len(self.q)

    @property
    def queries(self) -> int:
        """Of each sequence; 0 where they differ."""
        if self.packed:
            lengths = {end - start for start, end in _spans(self.lengths_q)}
            return lengths.pop() if len(lengths) == 1 else 0
        return self.q.shape[2 if self.layout == "BNSD" else 1]

    @property
    def room(self) -> int:
        """Keys that a sequence of a padded layout has places for."""
        if self.table is not None:
            return self.table.shape[1] * self.block_size
        return self.k.shape[2 if self.layout == "BNSD" else 1]

    def _check_heads(self) -> None:
        heads, heads_kv, d = self.heads, self.heads_kv, self.d
        require(1 <= heads <= MAX_HEADS, f"num_heads {heads} is not in 1..{MAX_HEADS}")
        require(
            heads_kv > 0 and heads % heads_kv == 0, f"num_heads {heads}, num_key_value_heads {heads_kv}: no multiple"
        )
        require(heads // heads_kv <= MAX_SHARING, f"{heads} heads over {heads_kv}: at most {MAX_SHARING} may share one")
        if self.layout != "BSH":
            found = self.q.shape[1 if self.layout == "BNSD" else -2]
            require(found == heads, f"num_heads is {heads}, but the query has {found} heads")
        most = MAX_D_PACKED if self.packed else MAX_D
        require(0 < d <= most and d % 16 == 0, f"D = {d} is not a multiple of 16 of at most {most}")
        if self.table is None and self.layout != "BSH":
            found = self.k.shape[1 if self.layout == "BNSD" else -2]
            require(found == heads_kv, f"num_key_value_heads is {heads_kv}, but the key has {found} heads")
        width = self.k.shape[-1]
        expected = d if self.table is None and self.layout != "BSH" else heads_kv * d
        require(width == expected, f"the key's last dimension is {width}, not {expected}")

    def _check_blocks(self) -> None:
        table, size = self.table, self.block_size
        assert table is not None
        require(self.k.dim() == 3, "a cache has a reference as [blocks, block_size, heads * D] only")
        require(self.k.shape[1] == size, f"block_size is {size}, but the blocks have {self.k.shape[1]} places")
        require(
            self.k.shape[2] <= MAX_CACHE_WIDTH, f"heads * D of a cache is {self.k.shape[2]}, over {MAX_CACHE_WIDTH}"
        )
        if self.packed:
            require(0 < size <= 128 and size % 16 == 0, f"TND: block_size {size} is not 16, 32, ... 128")
        elif self.queries > 1:
            require(0 < size <= 512 and size % 128 == 0, f"block_size {size} is not 128, 256, 384 or 512")
        else:
            require(0 < size <= 512 and size % 16 == 0, f"block_size {size} is not a multiple of 16 of at most 512")
        require(table.dtype == torch.int32, f"block_table must be int32, not {table.dtype}")
        require(table.dim() == 2, f"block_table must have 2 dimensions, not {table.dim()}")
        require(len(table) == self.batch, f"block_table has {len(table)} rows for {self.batch} sequences")
        require(bool(self.lengths_kv), "a cache in blocks needs actual_seq_lengths_kv")
        needed = [-(-length // size) for length in self._kv_lengths()]
        require(max(needed) <= table.shape[1], f"{max(needed)} blocks are needed, block_table has {table.shape[1]}")
        require(sum(needed) <= len(self.k), f"the sequences need {sum(needed)} blocks, the cache has {len(self.k)}")

    def _check_packed(self) -> None:
        ends, ends_kv = self.lengths_q, self.lengths_kv
        require(bool(ends and ends_kv), "TND needs actual_seq_lengths and actual_seq_lengths_kv")
        require(len(ends) <= MAX_SEQUENCES, f"{len(ends)} sequences are more than {MAX_SEQUENCES}")
        require(len(ends) == len(ends_kv), f"{len(ends)} actual_seq_lengths, {len(ends_kv)} actual_seq_lengths_kv")
        _check_ends("actual_seq_lengths", ends, len(self.q))
        if self.table is None:
            _check_ends("actual_seq_lengths_kv", ends_kv, len(self.k))
        exact = self.precise == 0 or (
            self.precise == 1 and self.heads == self.heads_kv and self.q.dtype == torch.float16
        )
        require(exact, f"TND: inner_precise {self.precise} is not 0 (or 1, in float16 and without shared key heads)")

    def _check_padded(self) -> None:
        require(self.batch <= MAX_BATCH, f"a batch of {self.batch} is more than {MAX_BATCH}")
        if self.table is None:
            require(len(self.k) == self.batch, f"a query for {self.batch} sequences, a key for {len(self.k)}")
        if self.queries == 1:
            require(self.room <= MAX_KEYS_OF_ONE_QUERY, f"{self.room} keys are more than {MAX_KEYS_OF_ONE_QUERY}")
        most = 1 if self.queries == 1 else 3
        require(0 <= self.precise <= most, f"inner_precise {self.precise} is not in 0..{most}")
        for name, lengths, room in (
            ("actual_seq_lengths", self.lengths_q, self.queries),
            ("actual_seq_lengths_kv", self.lengths_kv, self.room),
        ):
            require(len(lengths) in (0, 1) or len(lengths) >= self.batch, f"{name} has {len(lengths)} elements")
            require(all(0 <= one <= room for one in lengths), f"{name} {lengths} has some not in 0..{room}")

    # --- masks ---

    def _check_mask(self) -> None:
        require(DEFAULT <= self.sparse <= RIGHT_DOWN, f"sparse_mode {self.sparse} has no reference; 0 to 3 have")
        if self.packed:
            fits = (self.sparse, self.mask is None) in ((DEFAULT, True), (RIGHT_DOWN, False))
            require(fits, "TND: sparse_mode 0 takes no atten_mask, and sparse_mode 3 needs one; no other")
        mask = self.mask
        if mask is None:
            require(self.sparse == DEFAULT or self.queries == 1, f"sparse_mode {self.sparse} needs an atten_mask")
            return
        require(mask.dtype in MASKS, f"atten_mask must be bool, int8 or uint8 (1 hides), not {mask.dtype}")
        if self._compressed:
            square = (COMPRESSED, COMPRESSED)
            require(
                tuple(mask.shape) in (square, (1, *square), (1, 1, *square)),
                f"sparse_mode {self.sparse} takes the compressed atten_mask [2048, 2048], not {list(mask.shape)}",
            )
            require(
                torch.equal(mask.reshape(square).view(torch.int64), _upper_triangle().view(torch.int64)),
                f"sparse_mode {self.sparse}: the compressed atten_mask must be triu(ones(2048, 2048), 1), 1 hides",
            )
            return
        require(bool((mask.view(torch.uint8) <= 1).all()), "atten_mask has values other than 0 and 1")
        b, queries, keys = self.batch, self.queries, self.room
        if queries == 1:
            shapes = [(b, keys), (b, 1, keys), (b, 1, 1, keys)]
        else:
            shapes = [(queries, keys), *((rows, *one, queries, keys) for rows in (b, 1) for one in ((), (1,)))]
        require(tuple(mask.shape) in shapes, f"atten_mask {list(mask.shape)} is none of {shapes}")
        if queries > 1 and self.sparse == DEFAULT:
            require(min(self.before, self.after) >= max(queries, keys), "pre_tokens and next_tokens have no reference")

    @property
    def _compressed(self) -> bool:
        """One query of a padded layout ignores the sparse mode."""
        return self.packed or (self.queries > 1 and self.sparse >= LEFT_UP)

    def _hidden(self, index: int, rows: int, columns: int) -> Tensor | None:
        if self.mask is None:
            return None
        if not self._compressed:
            mask = self.mask.view(self.batch if self.queries == 1 else -1, 1, self.queries, self.room).bool()
            return mask[index if len(mask) > 1 else 0, :, :rows, :columns]
        shift = 0 if self.sparse == LEFT_UP else columns - rows
        require(shift >= 0, f"sparse_mode 3: sequence {index} has {rows} queries and only {columns} keys")
        return torch.arange(columns) > torch.arange(rows)[:, None] + shift

    # --- sequences ---

    def _kv_lengths(self) -> list[int]:
        """How many keys each sequence has."""
        if self.packed and self.table is None:
            return [end - start for start, end in _spans(self.lengths_kv)]
        return _for_each(self.lengths_kv, self.batch, self.room)

    def _rows(self, x: Tensor, heads: int) -> list[Tensor]:
        """[N, S, D] views of each sequence of a padded layout."""
        if self.layout == "BSH":
            x = x.unflatten(-1, (heads, -1))
        return list(x if self.layout == "BNSD" else x.transpose(1, 2))

    def _queries_of(self, x: Tensor) -> list[Tensor]:
        if self.packed:
            return [x[start:end].transpose(0, 1) for start, end in _spans(self.lengths_q)]
        lengths = [self.queries] * self.batch if self.queries == 1 else self._query_lengths()
        return [one[:, :length] for one, length in zip(self._rows(x, self.heads), lengths, strict=True)]

    def _query_lengths(self) -> list[int]:
        return _for_each(self.lengths_q, self.batch, self.queries)

    def _keys_of(self, x: Tensor) -> list[Tensor]:
        if self.table is not None:
            return [self._from_blocks(x, row, length) for row, length in enumerate(self._kv_lengths())]
        if self.packed:
            return [x[start:end].transpose(0, 1) for start, end in _spans(self.lengths_kv)]
        rows = zip(self._rows(x, self.heads_kv), self._kv_lengths(), strict=True)
        return [one[:, :length] for one, length in rows]

    def _from_blocks(self, cache: Tensor, row: int, length: int) -> Tensor:
        assert self.table is not None
        blocks = self.table[row, : -(-length // self.block_size)].long()
        inside = bool(((blocks >= 0) & (blocks < len(cache))).all())
        require(inside, f"block_table of sequence {row} names a block that the cache of {len(cache)} lacks")
        return cache[blocks].flatten(0, 1)[:length].unflatten(-1, (self.heads_kv, -1)).transpose(0, 1)

    def sequences(self, out: Tensor, lse: Tensor | None) -> Iterator[Sequence]:
        queries, outs = self._queries_of(self.q), self._queries_of(out)
        if lse is None:
            sums: list[Any] = [None] * self.batch
        elif self.packed:
            sums = self._queries_of(lse)
        else:
            sums = [one[:, : q.shape[1]] for one, q in zip(lse, queries, strict=True)]
        rows = zip(queries, self._keys_of(self.k), self._keys_of(self.v), outs, sums, strict=True)
        for index, (q, k, v, into, sum_into) in enumerate(rows):
            if q.shape[1]:
                yield Sequence(q, k, v, self._hidden(index, q.shape[1], k.shape[1]), into, sum_into)


def _spans(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends], ends, strict=False))


def _check_ends(name: str, ends: list[int], tokens: int) -> None:
    require(all(0 <= start <= end for start, end in _spans(ends)), f"TND: {name} must not decrease, got {ends}")
    require(ends[-1] == tokens, f"TND: {name} ends at {ends[-1]}, but there are {tokens} tokens")


def _for_each(lengths: list[int], batch: int, room: int) -> list[int]:
    """A single length is that of all; more than there are sequences are cut off."""
    return (lengths if len(lengths) > 1 else (lengths or [room]) * batch)[:batch]


def forward(
    *,
    k: list[Tensor],
    v: list[Tensor],
    lse_wanted: bool,
    heads: int,
    heads_kv: int,
    shared: list[int],
    out: Tensor,
    lse: Tensor,
    **call: Any,
) -> None:
    """What `Inference` has no field for must be absent or 0."""
    known = Inference.__dataclass_fields__
    others = {"shared": shared or None, **{name: value for name, value in call.items() if name not in known}}
    given = [name for name, value in others.items() if value is not None and not (type(value) is int and value == 0)]
    require(not given, f"no reference for {', '.join(given)}")
    require(len(k) == len(v) == 1, "key and value as lists of tensors have no reference")
    attention = Inference(
        k=k[0],
        v=v[0],
        heads=heads,
        heads_kv=heads_kv or heads,
        **{name: value for name, value in call.items() if name in known},
    )
    require(out.dtype == attention.q.dtype, f"the output is {out.dtype}, the query {attention.q.dtype}")
    out.fill_(torch.nan)  # what lies beyond actual_seq_lengths is nowhere defined
    for sequence in attention.sequences(out, lse if lse_wanted else None):
        _attend(sequence, attention)


def _attend(sequence: Sequence, attention: Inference) -> None:
    q, k, v, hidden, out, lse = sequence
    if not k.shape[1]:
        out.zero_()
        return
    scores = (grouped(q, len(k)) @ k.float().unsqueeze(1).mT).flatten(0, 1) * attention.scale
    if hidden is not None:
        corrected = attention.precise >= 2  # a query that sees nothing gets zeros
        require(corrected or not bool(hidden.all(-1).any()), "atten_mask hides every key from a query")
        scores = scores.masked_fill(hidden, LOWEST)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0)
    sums = weights.sum(-1, keepdim=True)
    out.copy_((weights.unflatten(0, (len(k), -1)) @ v.float().unsqueeze(1)).flatten(0, 1) / sums.clamp_min(TINY))
    if lse is not None:
        lse.copy_(top + sums.log())


KERNELS: dict[str, Callable[..., None]] = {
    "aclnnFusedInferAttentionScoreV2": forward,
    "aclnnFusedInferAttentionScoreV3": forward,
    "aclnnFusedInferAttentionScoreV4": forward,
}
