"""Reference kernels of fused attention, and of merging two attentions over parts of the keys.

Everything is computed in float32, one sequence at a time, as [N, S, D]: N heads, S positions, D elements. What CANN's
documents rule out is refused. The backward takes the softmax statistics and the output that it is given, as the
hardware does; it works for statistics that were merged over parts of the keys.

forward    P = exp(scale * Q K^T - maximum) / total,  O = P V
backward   dV = P^T dO,  dS = scale * P * (dO V^T - rowsum(dO * O)),  dQ = dS K,  dK = dS^T Q
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NO_LIMIT = 2**31 - 1  # the default of pre_tockens and next_tockens
STATISTICS = 8  # each statistic is stored eight times
LOWEST = -3.0e38  # the score of what is hidden
TINY = torch.finfo(torch.float32).tiny  # keeps 0 / 0 at 0 for a query that sees nothing
MAX_D, MAX_HEADS = 768, 256
MAX_SEQUENCES = 1024  # packed ones; the pages say 2K and 1K, and what keeps to the least is right either way
COMPRESSED = 2048  # sparse modes 2, 3 and 4 take a mask of this size, whatever the lengths are
DEFAULT, ALL, LEFT_UP, RIGHT_DOWN, BAND = range(5)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Attention:
    """The arguments that forward and backward share, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    before: int
    after: int
    heads: int
    layout: str
    sparse: int
    ends_q: list[int]
    ends_kv: list[int]
    same_statistics_layout: bool = False
    """TND only: the statistics are [T, N, 8] like the input, not [N, S, 8] of one sequence after another."""

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        require(self.layout in LAYOUTS, f"input layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        dims = 3 if self.layout in ("BSH", "SBH", "TND") else 4
        require(q.dim() == k.dim() == v.dim() == dims, f"layout {self.layout} needs tensors of {dims} dimensions")
        require(
            q.dtype == k.dtype == v.dtype and q.dtype in DTYPES,
            f"q, k and v must have one type of float16, bfloat16 and float32, not {q.dtype}, {k.dtype}, {v.dtype}",
        )
        require(DEFAULT <= self.sparse <= BAND, f"sparse_mode {self.sparse} has no reference; 0 to 4 have")
        self._check_heads()
        if self.layout == "TND":
            _check_ends("actual_seq_qlen", self.ends_q, len(q))
            _check_ends("actual_seq_kvlen", self.ends_kv, len(k))
            require(len(self.ends_q) == len(self.ends_kv), "actual_seq_qlen and actual_seq_kvlen differ in length")
        self._check_mask()

    def _check_heads(self) -> None:
        heads_kv, heads, d = self.heads_kv, self.heads, self.d
        require(1 <= heads <= MAX_HEADS, f"head_num {heads} is not in 1..{MAX_HEADS}")
        require(1 <= d <= MAX_D, f"D = {d} is not in 1..{MAX_D}")
        if self.layout in ("BSND", "BNSD", "TND"):
            found = self.q.shape[1 if self.layout == "BNSD" else -2]
            require(found == heads, f"head_num is {heads}, but the query has {found} heads")
        require(heads_kv > 0 and heads % heads_kv == 0, f"{heads} query heads do not share {heads_kv} key heads evenly")

    def _check_mask(self) -> None:
        if self.mask is None:  # then sparse_mode is without effect: every query sees every key
            return
        mask, kind = self.mask, self.mask.dtype
        require(kind in (torch.bool, torch.uint8), f"atten_mask must be bool or uint8 (True hides), not {kind}")
        if self.sparse < LEFT_UP:
            return
        require(
            tuple(mask.shape) == (COMPRESSED, COMPRESSED),
            f"sparse_mode {self.sparse} takes the compressed atten_mask [2048, 2048], not {list(mask.shape)}",
        )
        require(
            torch.equal(mask.contiguous().view(torch.int64), _upper_triangle().view(torch.int64)),
            f"sparse_mode {self.sparse}: the compressed atten_mask must be triu(ones(2048, 2048), 1), True hides",
        )

    @property
    def d(self) -> int:
        return self.q.shape[-1] // self.heads if self.layout in ("BSH", "SBH") else self.q.shape[-1]

    @property
    def heads_kv(self) -> int:
        if self.layout in ("BSH", "SBH"):
            return self.k.shape[-1] // max(self.d, 1)
        return int(self.k.shape[1 if self.layout == "BNSD" else -2])

    def sequences(self, x: Tensor, query: bool) -> list[Tensor]:
        """[N, S, D] views of each sequence."""
        heads = self.heads if query else self.heads_kv
        if self.layout == "BNSD":
            return list(x)
        if self.layout == "BSND":
            return list(x.transpose(1, 2))
        if self.layout == "BSH":
            return list(x.unflatten(-1, (heads, -1)).transpose(1, 2))
        if self.layout == "SBH":
            return list(x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3))
        return [part.transpose(0, 1) for part in _split(x, self.ends_q if query else self.ends_kv)]

    def statistics(self, x: Tensor) -> list[Tensor]:
        """[N, S, 8] views of each sequence."""
        require(x.dtype == torch.float32, f"softmax statistics are float32, not {x.dtype}")
        if self.layout != "TND":
            return list(x)
        return statistics_of_packed(x, self.ends_q, self.same_statistics_layout)

    def hidden(self, index: int, rows: int, columns: int) -> Tensor | None:
        """bool, broadcast to [N, rows, columns]: what a sequence's queries must not see."""
        if self.mask is None:
            return None
        row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
        if self.sparse == LEFT_UP:
            return column > row
        shift = columns - rows
        if self.sparse == RIGHT_DOWN:
            require(rows <= columns, f"sparse_mode 3: sequence {index} has {rows} queries and only {columns} keys")
            return column > row + shift
        if self.sparse == BAND:
            require(
                self.before + self.after >= 0, f"sparse_mode 4: pre_tockens {self.before} and next_tockens {self.after}"
            )
            return (column > row + shift + self.after) | (column < row + shift - self.before)
        mask = self._own_mask(index, rows, columns)
        if self.sparse == DEFAULT and min(self.before, self.after) < NO_LIMIT:
            outside = (column > row + self.after) | (column < row - self.before)
            require(
                bool((mask | ~outside).all()),
                "sparse_mode 0: pre_tockens and next_tockens leave out what atten_mask does not hide",
            )
        return mask

    def _own_mask(self, index: int, rows: int, columns: int) -> Tensor:
        assert self.mask is not None
        mask = self.mask.bool()
        if mask.dim() == 4:
            mask = mask[index if len(mask) > 1 else 0]
        fits = mask.dim() in (2, 3) and mask.shape[-2] >= rows and mask.shape[-1] >= columns
        if self.layout != "TND":
            fits = fits and tuple(mask.shape[-2:]) == (rows, columns)
        require(fits, f"atten_mask {list(self.mask.shape)} does not fit {rows} queries and {columns} keys")
        return mask[..., :rows, :columns]

    def scores(self, index: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scaled scores [N, S, S] in float32, and what is hidden of them."""
        hidden = self.hidden(index, q.shape[1], k.shape[1])
        if hidden is not None and self.layout == "TND":
            empty = hidden.all(-1)
            require(not bool(empty.any()), f"atten_mask hides every key from a query of sequence {index}")
        scores = (grouped(q, len(k)) @ k.float().unsqueeze(1).mT).flatten(0, 1) * self.scale
        return (scores if hidden is None else scores.masked_fill(hidden, LOWEST)), hidden


@cache
def _upper_triangle() -> Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)


def _check_ends(name: str, ends: list[int], tokens: int) -> None:
    require(bool(ends), f"layout TND needs {name}: where each sequence ends, as a list of int")
    require(len(ends) <= MAX_SEQUENCES, f"{name} has {len(ends)} sequences, and a call takes at most {MAX_SEQUENCES}")
    require(all(a <= b for a, b in zip([0, *ends], ends, strict=False)), f"{name} {ends} must not decrease")
    require(ends[-1] == tokens, f"{name} ends at {ends[-1]}, but there are {tokens} tokens")


def _split(x: Tensor, ends: list[int]) -> list[Tensor]:
    return [x[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def statistics_of_packed(x: Tensor, ends: list[int], same_as_input: bool) -> list[Tensor]:
    """Statistics [T, N, 8] as [N, S, 8] views of each sequence; unless they are laid out as the input, each sequence's
    part of the memory is in the order [N, S, 8]."""
    require(x.is_contiguous(), "softmax statistics must be contiguous")
    parts = _split(x, ends)
    if same_as_input:
        return [part.transpose(0, 1) for part in parts]
    return [part.reshape(x.shape[1], len(part), STATISTICS) for part in parts]


def grouped(x: Tensor, heads_kv: int) -> Tensor:
    """[N, S, D] -> float32 [N_kv, N / N_kv, S, D]"""
    return x.float().unflatten(0, (heads_kv, -1))


def _attention(
    *,
    keep: float,
    pse: Tensor | None,
    drop: Tensor | None,
    padding: Tensor | None,
    prefix: list[int],
    precise: int,
    ends_q: Sequence[int] = (),
    ends_kv: Sequence[int] = (),
    statistics_layout: str = "",
    **shared: Any,
) -> Attention:
    """From the arguments of any version of the operators; those that have no reference must be absent."""
    require(keep == 1, f"keep_prob is {keep}: dropout has no reference")
    require(not prefix, "prefix has no reference")
    for name, tensor in (("pse", pse), ("drop_mask", drop), ("padding_mask", padding)):
        require(tensor is None or not tensor.numel(), f"{name} has no reference")
    require(statistics_layout in ("", "same_as_input"), f"softmax layout {statistics_layout!r} is unknown")
    same = statistics_layout == "same_as_input"
    return Attention(**shared, ends_q=list(ends_q), ends_kv=list(ends_kv), same_statistics_layout=same)


def forward(*, maximum: Tensor, total: Tensor, softmax_out: Tensor | None, out: Tensor, **call: Any) -> None:
    attention = _attention(**call)
    queries, keys = attention.sequences(attention.q, True), attention.sequences(attention.k, False)
    values, outs = attention.sequences(attention.v, False), attention.sequences(out, True)
    require(len(queries) == len(keys) == len(values), "q, k and v differ in the number of sequences")
    maxima, totals = attention.statistics(maximum), attention.statistics(total)
    for index, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        if not q.shape[1]:
            continue
        scores, hidden = attention.scores(index, q, k)
        top = scores.amax(-1, keepdim=True)
        weights = _shown((scores - top).exp(), hidden)
        sums = weights.sum(-1, keepdim=True)
        mixed = weights.unflatten(0, (len(k), -1)) @ v.float().unsqueeze(1)
        outs[index].copy_(mixed.flatten(0, 1) / sums.clamp_min(TINY))
        maxima[index].copy_(top.expand(-1, -1, STATISTICS))
        totals[index].copy_(sums.expand(-1, -1, STATISTICS))


def backward(
    *,
    grad: Tensor,
    maximum: Tensor,
    total: Tensor,
    softmax_in: Tensor | None,
    out: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_pse: Tensor | None,
    **call: Any,
) -> None:
    attention = _attention(**call)
    of_queries = [attention.sequences(x, True) for x in (attention.q, grad, out, grad_q)]
    of_keys = [attention.sequences(x, False) for x in (attention.k, attention.v, grad_k, grad_v)]
    statistics = [attention.statistics(x) for x in (maximum, total)]
    for index, (q, d_out, o, into_q, k, v, into_k, into_v, top, sums) in enumerate(
        zip(*of_queries, *of_keys, *statistics, strict=True)
    ):
        if not q.shape[1]:
            into_k.zero_()
            into_v.zero_()
            continue
        scores, hidden = attention.scores(index, q, k)
        weights = _shown((scores - top[..., :1]).exp() / sums[..., :1].clamp_min(TINY), hidden)
        p = weights.unflatten(0, (len(k), -1))
        g = grouped(d_out, len(k))
        d_p = g @ v.float().unsqueeze(1).mT
        d_s = p * (d_p - (g * grouped(o, len(k))).sum(-1, keepdim=True)) * attention.scale
        into_q.copy_((d_s @ k.float().unsqueeze(1)).flatten(0, 1))
        into_k.copy_((d_s.mT @ grouped(q, len(k))).sum(1))
        into_v.copy_((p.mT @ g).sum(1))


def _shown(weights: Tensor, hidden: Tensor | None) -> Tensor:
    return weights if hidden is None else weights.masked_fill(hidden, 0)


KERNELS: dict[str, Callable[..., None]] = {
    "aclnnFlashAttentionScore": forward,
    "aclnnFlashAttentionVarLenScore": forward,
    "aclnnFlashAttentionVarLenScoreV4": forward,
    "aclnnFlashAttentionScoreGrad": backward,
    "aclnnFlashAttentionUnpaddingScoreGrad": backward,
    "aclnnFlashAttentionUnpaddingScoreGradV4": backward,
}
