"""Implementations for CUDA devices. The import works without them; what cannot run is not registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu_vlrl.kernels import reference, triton_layers, triton_logprob
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.reference import Linear
from npu_vlrl.kernels.table import op, register
from npu_vlrl.kernels.tree import Tree

# --- attention -------------------------------------------------------------------------------------------------------


def _flash_takes(x: Tensor) -> bool:
    """Whether torch's flash kernels compute `x`: half precision, heads of up to 256 in multiples of 8."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256


@lru_cache(maxsize=256)
def packed_lengths(
    cu_q: tuple[int, ...], cu_k: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative lengths on the device, and the largest length; cached, since all layers need them and a copy waits."""
    on_device = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (cu_q, cu_k))
    longest = (max((b - a for a, b in zip(cu, cu[1:], strict=False)), default=0) for cu in (cu_q, cu_k))
    return *on_device, *longest  # type: ignore[return-value]


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: tuple[int, ...],
        cu_k: tuple[int, ...],
        causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.rest = (*packed_lengths(cu_q, cu_k, q.device), 0.0, causal)
        out: Tensor
        out, lse, random = torch.ops.aten._flash_attention_forward(q, k, v, *ctx.rest, False, scale=scale)[:3]
        ctx.save_for_backward(q, k, v, out, lse, random)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *inputs, random = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *inputs, *ctx.rest, random, random, scale=ctx.scale
        )
        return *grads, None, None, None, None


@lru_cache(maxsize=64)
def _check(cu_q: tuple[int, ...], cu_k: tuple[int, ...], n_queries: int, n_keys: int, causal: bool) -> None:
    reference.checked_lengths(cu_q, cu_k, n_queries, n_keys, causal)


@register("varlen_attention", "cuda")
def varlen_attention(
    q_HTD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    causal: bool,
    scale: float,
) -> Tensor:
    """CUDA implementation of `reference.varlen_attention`: one packed call where flash attention supports dtype and
    width.
    """
    if not _flash_takes(q_HTD):
        return reference.varlen_attention(q_HTD, k_KSD, v_KSD, cu_q, cu_k, causal, scale)
    cu_q, cu_k = tuple(cu_q), tuple(cu_k)
    _check(cu_q, cu_k, q_HTD.shape[1], k_KSD.shape[1], causal)
    if not q_HTD.shape[1]:
        return q_HTD.transpose(0, 1)
    q, k, v = (x.transpose(0, 1) for x in (q_HTD, k_KSD, v_KSD))
    out_THD: Tensor = _Flash.apply(q, k, v, cu_q, cu_k, causal, scale)  # type: ignore[no-untyped-call]
    return out_THD


@register("tree_attention", "cuda")
def tree_attention(q_HTD: Tensor, k_KSD: Tensor, v_KSD: Tensor, tree: Tree, scale: float) -> Tensor:
    """CUDA implementation of `reference.tree_attention`: one packed call over the gathered keys of each node's path,
    which are small where heads share them.

    One H200, 16 heads and 2 key heads of 128, 8 prompts of 520 tokens with 8 answers of about 300 each, forward and
    backward: 2.9 ms; flex attention with a block mask 3.7 ms after 11 s of compiling; a call for each depth, merged,
    5.3 ms (benchmarks/README.md).
    """
    if tree.shares:
        path = tree.path_on(k_KSD.device)
        k_KSD, v_KSD = k_KSD[:, path], v_KSD[:, path]
    return varlen_attention(q_HTD, k_KSD, v_KSD, tree.bounds, tree.path_bounds, True, scale)


@register("decode_attention", "cuda")
def decode_attention(q_HTD: Tensor, keys_BLKD: Tensor, values_BLKD: Tensor, rows: CacheRows, scale: float) -> Tensor:
    """CUDA implementation of `reference.decode_attention`: the kernel reads each row up to its length only."""
    if not _flash_takes(q_HTD):
        return reference.decode_attention(q_HTD, keys_BLKD, values_BLKD, rows, scale)
    most = max(b - a for a, b in zip(rows.cu_q, rows.cu_q[1:], strict=False))
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q_HTD.transpose(0, 1),
        keys_BLKD.flatten(0, 1),
        values_BLKD.flatten(0, 1),
        rows.starts_q,
        rows.starts_k,
        most,
        rows.longest,
        0.0,
        most > 1,
        False,
        scale=scale,
        seqused_k=rows.lengths_B,
    )
    return found[0]


# --- parts of layers -------------------------------------------------------------------------------------------------

ALIGNED = 8
"""Number of half-precision elements in the 16 bytes that fast matrix products read at a time."""


@register("gated_mlp", "cuda")
def gated_mlp(x: Tensor, gate: Linear, up: Linear, down: Linear) -> Tensor:
    """CUDA implementation of `reference.gated_mlp`: the inner width is padded with zeros to a multiple of `ALIGNED`.

    The tower of Qwen2.5-VL is 3420 wide: without padding its products ran at a third of the speed.
    """
    missing = -len(gate[0]) % ALIGNED
    grown = [
        (F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing)))
        for weight, bias in (gate, up)
    ]
    inner = op("swiglu")(F.linear(x, *grown[0]), F.linear(x, *grown[1]))
    return F.linear(inner, F.pad(down[0], (0, missing)), down[1])


# --- log-probability and entropy -------------------------------------------------------------------------------------


def logprob_entropy(hidden_TH: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """CUDA implementation of `reference.logprob_entropy` by Triton. The reference computes float64, which Triton would
    round, no rows, and float32.

    One H200, 2048 rows, 151936 ids of width 2048, forward and backward: in bfloat16 8.1 ms, the reference 25.5; in
    float32, which Triton multiplies without tensor cores, 254 ms, the reference 116 (benchmarks/README.md).
    """
    worth_it = triton_logprob.suitable(hidden_TH) and hidden_TH.dtype != torch.float32
    chosen: Callable[..., tuple[Tensor, Tensor]]
    chosen = triton_logprob.logprob_entropy if worth_it else reference.logprob_entropy
    return chosen(hidden_TH, *rest, **options)


if triton_logprob.available("nvidia"):
    register("logprob_entropy", "cuda")(logprob_entropy)
    for part in (triton_layers.rms_norm, triton_layers.rotary, triton_layers.swiglu):
        register(part.__name__, "cuda")(part)
