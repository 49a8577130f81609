"""Implementations for Ascend NPUs, by the fused operators of torch_npu.

The import works without torch_npu: its operators are looked up at the call, and a device exists only once it is loaded.
The limits in this file are those in CANN's documents of the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_vlrl.kernels import mindspeed, reference, triton_logprob
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.table import register
from npu_vlrl.kernels.tensor_cache import OncePerTensor
from npu_vlrl.kernels.tree import MOST_SEQUENCES, Tree
from npu_vlrl.kernels.tree_parts import tree_attention as by_parts

SEE_MASK, SEE_PAST = 1, 3
"""Sparse modes: the given mask, and causal, aligned at the end."""

EMPTY_ROWS = 2
"""Precision mode that handles queries that see no key. It costs time."""

BLOCK, MOST_INFERRED = 128, 4096
"""Limits of the inference attention over packed sequences: slots of a cache's block, and sequences of a call."""

# --- attention -------------------------------------------------------------------------------------------------------


@register("varlen_attention", "npu")
def varlen_attention(
    q_HTD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    causal: bool,
    scale: float,
) -> Tensor:
    """NPU implementation of `reference.varlen_attention`: sequences of one length form a batch (BNSD), others are
    packed (TND).
    """
    packing = _packing(tuple(cu_q), tuple(cu_k), q_HTD.shape[1], k_KSD.shape[1], causal)
    options: dict[str, Any] = {"scale": scale}
    if causal:
        options |= {"atten_mask": _future(q_HTD.device), "sparse_mode": SEE_PAST}
    if packing.batch:
        q, k, v = (torch.unflatten(x, 1, (packing.batch, -1)).transpose(0, 1) for x in (q_HTD, k_KSD, v_KSD))
        return _fused(q, k, v, len(q_HTD), "BNSD", **options).transpose(1, 2).flatten(0, 1)
    q, k, v = (x.transpose(0, 1) for x in (q_HTD, k_KSD, v_KSD))
    outputs = [
        _fused(
            _take(q, call.queries),
            _take(k, call.keys),
            _take(v, call.keys),
            len(q_HTD),
            "TND",
            actual_seq_qlen=call.query_ends,
            actual_seq_kvlen=call.key_ends,
            **options,
        )
        for call in packing.calls
    ]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0] if outputs else q


@register("tree_attention", "npu")
def tree_attention(q_HTD: Tensor, k_KSD: Tensor, v_KSD: Tensor, tree: Tree, scale: float) -> Tensor:
    """NPU implementation of `reference.tree_attention`: packed calls (TND), merged and differentiated with common
    statistics.
    """
    if not tree.shares:
        return varlen_attention(q_HTD, k_KSD, v_KSD, tree.bounds, tree.bounds, True, scale)
    return by_parts(q_HTD, k_KSD, v_KSD, tree, scale, _Packed())


class _Packed:
    """See `tree_parts.Fused`. The operator stores a maximum and a sum, each eight times."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        options = self._options(q, cu_q, cu_k, causal)
        out, largest, total = torch.ops.npu.npu_fusion_attention(q, k, v, q.shape[1], "TND", scale=scale, **options)[:3]
        return out, largest[..., 0] + total[..., 0].log()

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_q: list[int],
        cu_k: list[int],
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by the operator, given the log-sum-exp as maximum and 1 as sum: exp(score - maximum) / sum is then
        the same.
        """
        largest = lse[..., None].expand(-1, -1, 8).contiguous()
        found = torch.ops.npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            grad.contiguous(),
            q.shape[1],
            "TND",
            softmax_max=largest,
            softmax_sum=torch.ones_like(largest),
            attention_in=out,
            scale_value=scale,
            **self._options(q, cu_q, cu_k, causal),
        )
        return found[0], found[1], found[2]

    @staticmethod
    def _options(q: Tensor, cu_q: list[int], cu_k: list[int], causal: bool) -> dict[str, Any]:
        mask = {"atten_mask": _future(q.device), "sparse_mode": SEE_PAST} if causal else {}
        return {"actual_seq_qlen": cu_q[1:], "actual_seq_kvlen": cu_k[1:], "softmax_layout": "TND", **mask}


@register("masked_attention", "npu")
def masked_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1TS: Tensor, scale: float) -> Tensor:
    """NPU implementation of `reference.masked_attention`. The operator's mask is the opposite of ours: True hides."""
    _, heads, n_queries, _ = q_BHTD.shape
    options: dict[str, Any] = {"scale": scale, "atten_mask": ~mask_B1TS, "sparse_mode": SEE_MASK}
    if n_queries > 1:  # some may be padding; a query that is alone in its row is not
        options["inner_precise"] = EMPTY_ROWS
    return _fused(q_BHTD, k_BKSD, v_BKSD, heads, "BNSD", **options).transpose(1, 2)


@register("decode_attention", "npu")
def decode_attention(q_HTD: Tensor, keys_BLKD: Tensor, values_BLKD: Tensor, rows: CacheRows, scale: float) -> Tensor:
    """NPU implementation of `reference.decode_attention`, without a copy of the KV cache. In 16 bits it calls the
    inference attention, which takes no float32. Float32, and several queries a row with unsuitable lengths or slots,
    go to the training attention.
    """
    half = q_HTD.dtype in (torch.float16, torch.bfloat16)
    if len(rows.lengths_B) == q_HTD.shape[1]:
        return (_decoded if half else _decoded_in_float32)(q_HTD, keys_BLKD, values_BLKD, rows, scale)
    if half and keys_BLKD.shape[1] % BLOCK == 0 and 0 < len(rows.lengths) <= MOST_INFERRED:
        return _continued(q_HTD, keys_BLKD, values_BLKD, rows, scale)
    return reference.decode_attention(q_HTD, keys_BLKD, values_BLKD, rows, scale, masked_attention)


def _decoded(q_HTD: Tensor, keys_BLKD: Tensor, values_BLKD: Tensor, rows: CacheRows, scale: float) -> Tensor:
    """Attention of one query a row (BSND). The mask is on the device, so that a captured graph sees changed lengths."""
    q_BTHD = q_HTD.transpose(0, 1)[:, None].contiguous()
    options: dict[str, Any] = {"atten_mask": _beyond(keys_BLKD, rows), "actual_seq_lengths_kv": [rows.longest]}
    return _inferred(q_BTHD, keys_BLKD, values_BLKD, keys_BLKD.shape[2], scale, input_layout="BSND", **options)[:, 0]


def _decoded_in_float32(q_HTD: Tensor, keys_BLKD: Tensor, values_BLKD: Tensor, rows: CacheRows, scale: float) -> Tensor:
    options = {"scale": scale, "atten_mask": _beyond(keys_BLKD, rows), "sparse_mode": SEE_MASK}
    return _fused(q_HTD.transpose(0, 1)[:, None], keys_BLKD, values_BLKD, len(q_HTD), "BSND", **options)[:, 0]


def _beyond(keys_BLKD: Tensor, rows: CacheRows) -> Tensor:
    """Mask [B, 1, 1, L] of the slots beyond each row's length. True hides."""
    places = torch.arange(keys_BLKD.shape[1], device=keys_BLKD.device)
    return (places >= rows.lengths_B[:, None])[:, None, None]


def _continued(q_HTD: Tensor, keys_BLKD: Tensor, values_BLKD: Tensor, rows: CacheRows, scale: float) -> Tensor:
    """Attention of packed queries (TND) over the rows' slots, viewed as blocks of a paged cache: without padding or
    mask.
    """
    n_rows, room, key_heads, _ = keys_BLKD.shape
    keys, values = (kept.view(n_rows * room // BLOCK, BLOCK, -1) for kept in (keys_BLKD, values_BLKD))
    return _inferred(
        q_HTD.transpose(0, 1).contiguous(),
        keys,
        values,
        key_heads,
        scale,
        atten_mask=_future(q_HTD.device),
        sparse_mode=SEE_PAST,
        block_table=_blocks(n_rows, room // BLOCK, q_HTD.device),
        block_size=BLOCK,
        actual_seq_lengths=rows.cu_q[1:],
        actual_seq_lengths_kv=rows.lengths,
        input_layout="TND",
    )


def _inferred(q: Tensor, k: Tensor, v: Tensor, key_heads: int, scale: float, **options: Any) -> Tensor:
    heads = {"num_heads": q.shape[-2], "num_key_value_heads": key_heads}
    found: tuple[Tensor, ...] = torch.ops.npu.npu_fused_infer_attention_score(q, k, v, scale=scale, **heads, **options)
    return found[0]


@lru_cache(maxsize=16)
def _blocks(n_rows: int, each: int, device: torch.device) -> Tensor:
    """int32 [rows, blocks of a row]: the block table; the blocks of a row are consecutive."""
    return torch.arange(n_rows * each, dtype=torch.int32, device=device).view(n_rows, each)


def _fused(q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, **options: Any) -> Tensor:
    found: tuple[Tensor, ...] = torch.ops.npu.npu_fusion_attention(q, k, v, heads, layout, **options)
    return found[0]


def _take(x_TND: Tensor, tokens: slice) -> Tensor:
    """Takes tokens. All of them are returned unsliced: the gradient of a slice would cost a copy."""
    return x_TND if tokens == slice(0, len(x_TND)) else x_TND[tokens]


@dataclass(frozen=True)
class _Call:
    """Tokens of one packed call, and the ends of its sequences, counted from the first of these tokens."""

    queries: slice
    keys: slice
    query_ends: list[int]
    key_ends: list[int]


@dataclass(frozen=True)
class _Packing:
    batch: int
    """Number of sequences when all have the same lengths; else 0."""
    calls: tuple[_Call, ...]


@lru_cache(maxsize=64)
def _packing(cu_q: tuple[int, ...], cu_k: tuple[int, ...], n_queries: int, n_keys: int, causal: bool) -> _Packing:
    """Splits packed sequences into calls, cached for all layers of a forward pass: checking thousands of windows takes
    milliseconds.

    An empty sequence stays in the list: it ends where the one before it ends.
    """
    q_lengths, k_lengths = reference.checked_lengths(cu_q, cu_k, n_queries, n_keys, causal)
    if n_queries and len(set(q_lengths)) == len(set(k_lengths)) == 1:
        return _Packing(len(q_lengths), ())
    calls = []
    for first in range(0, len(q_lengths), MOST_SEQUENCES):
        ends = slice(first + 1, first + 1 + MOST_SEQUENCES)
        query_ends, key_ends = ([end - cu[first] for end in cu[ends]] for cu in (cu_q, cu_k))
        queries = slice(cu_q[first], cu_q[first] + query_ends[-1])
        calls.append(_Call(queries, slice(cu_k[first], cu_k[first] + key_ends[-1]), query_ends, key_ends))
    return _Packing(0, tuple(call for call in calls if call.query_ends[-1]))


@lru_cache
def _future(device: torch.device) -> Tensor:
    """The compressed causal mask, of this size for all lengths. True hides."""
    with torch.inference_mode(False):  # else the first call inside it would make one that autograd refuses later
        return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


# --- parts of layers -------------------------------------------------------------------------------------------------


@register("rms_norm", "npu")
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """NPU implementation of `reference.rms_norm`, rounded once: the product with `weight` is in float32, too."""
    found: tuple[Tensor, ...] = torch.ops.npu.npu_rms_norm(x, weight, epsilon)
    return found[0]


@register("rotary", "npu")
def rotary(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """NPU implementation of `reference.rotary`. The rows are joined into one: the operator takes fewer than 1000 rows,
    but any length.
    """
    reference.check_rotary(x_BTHD, cos_BTD, sin_BTD)
    wide = torch.promote_types(x_BTHD.dtype, cos_BTD.dtype)  # the operator wants one dtype
    cos, sin = (x.to(wide).expand(len(x_BTHD), -1, -1).flatten(0, 1)[None, :, None] for x in (cos_BTD, sin_BTD))
    rotated: Tensor = torch.ops.npu.npu_rotary_mul(x_BTHD.to(wide).flatten(0, 1)[None], cos, sin)
    return rotated.view(x_BTHD.shape).to(x_BTHD.dtype)


@register("swiglu", "npu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = torch.ops.npu.npu_swiglu(torch.cat([gate, up], -1), -1)
    return out


@register("patch_embed", "npu")
def patch_embed(patches_PD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """NPU implementation of `reference.patch_embed` as a matrix product: convolutions in bfloat16 are missing or
    rounded on some versions of CANN.
    """
    return F.linear(patches_PD, weight.flatten(1), bias)


_slots = OncePerTensor(lambda mask: mask.flatten().nonzero()[:, 0])


@register("add_at", "npu")
def add_at(x_BTH: Tensor, mask_BT: Tensor, rows_NH: Tensor) -> Tensor:
    """NPU implementation of `reference.add_at` by positions, found once for all layers: a write through a bool mask
    waits for the device, and fails on some.
    """
    return x_BTH.flatten(0, 1).index_add(0, _slots(mask_BT), rows_NH).view(x_BTH.shape)


# --- log-probability and entropy -------------------------------------------------------------------------------------

if triton_logprob.available("ascend"):

    @register("logprob_entropy", "npu")
    def logprob_entropy(hidden_TH: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """NPU implementation of `reference.logprob_entropy` by Triton, or the reference for unsuitable inputs."""
        suitable = triton_logprob.suitable(hidden_TH)
        chosen: Callable[..., tuple[Tensor, Tensor]]
        chosen = triton_logprob.logprob_entropy if suitable else reference.logprob_entropy
        return chosen(hidden_TH, *rest, **options)


mindspeed.register_offers()
