"""Tree attention by packed calls of a fused kernel: a call for each depth, merged by their log-sum-exp.

The parts of a softmax over disjoint sets of keys merge exactly, and so do their gradients: each part's backward pass
gets the *merged* output and log-sum-exp, and then computes its share of the gradient (as in ring attention, Liu et al.
2023, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu_vlrl.kernels.tree import Part, Tree

Places = slice | Tensor


class Fused(Protocol):
    """Packed attention with statistics. T queries, S keys, H heads, K key heads, D width.

    `cu_q`, `cu_k`, `causal` and `scale` are those of `reference.varlen_attention`.
    """

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, cu_q: list[int], cu_k: list[int], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The output [T, H, D] and the log-sum-exp of the scores, float32 [T, H]."""
        ...

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        cu_q: list[int],
        cu_k: list[int],
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, given output and log-sum-exp, which may include other keys."""
        ...


def tree_attention(q_HTD: Tensor, k_KSD: Tensor, v_KSD: Tensor, tree: Tree, scale: float, fused: Fused) -> Tensor:
    """Implementation of `reference.tree_attention` by packed calls of `fused`; returns [T, H, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q_HTD, k_KSD, v_KSD))
    out_THD: Tensor = _TreeAttention.apply(q, k, v, tree, scale, fused)  # type: ignore[no-untyped-call]
    return out_THD


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, tree: Tree, scale: float, fused: Fused
    ) -> Tensor:
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        out_THD = torch.zeros(q_THD.shape, dtype=wide, device=q_THD.device)
        lse_TH = torch.full(q_THD.shape[:2], -torch.inf, dtype=wide, device=q_THD.device)
        for part, queries, keys in _placed(tree, q_THD.device):
            more_THD, lse = fused.forward(
                q_THD[queries], k_TKD[keys], v_TKD[keys], part.cu_q, part.cu_k, part.causal, scale
            )
            merged = torch.logaddexp(lse_TH[queries], lse)
            before, after = (lse_TH[queries] - merged).exp()[..., None], (lse - merged).exp()[..., None]
            out_THD[queries] = out_THD[queries] * before + more_THD * after
            lse_TH[queries] = merged
        out_THD = out_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_TH)
        ctx.rest = tree, scale, fused
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Any, ...]:
        inputs = q, k, v, out, lse = ctx.saved_tensors
        tree, scale, fused = ctx.rest
        sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in inputs[:3]]
        for part, queries, keys in _placed(tree, q.device):
            given = (grad_THD[queries], q[queries], k[keys], v[keys], out[queries], lse[queries])
            found = fused.backward(*given, part.cu_q, part.cu_k, part.causal, scale)
            for total, places, more in zip(sums, (queries, keys, keys), found, strict=True):
                if isinstance(places, slice):
                    total[places] += more
                else:
                    total.index_add_(0, places, more.to(total.dtype))
        return (*(total.to(x.dtype) for total, x in zip(sums, inputs, strict=False)), None, None, None)


def _placed(tree: Tree, device: torch.device) -> list[tuple[Part, Places, Places]]:
    """The parts with the indices of their tokens, cached for all layers of a forward and a backward pass."""
    known = _known.setdefault(tree, {})
    if device not in known:
        known[device] = [(part, _places(part.queries, device), _places(part.keys, device)) for part in tree.parts]
    return known[device]


_known: WeakKeyDictionary[Tree, dict[torch.device, list[tuple[Part, Places, Places]]]] = WeakKeyDictionary()


def _places(slices: Sequence[slice], device: torch.device) -> Places:
    """Indices of several slices. Consecutive slices become one slice, which costs no copy."""
    if all(a.stop == b.start for a, b in zip(slices, slices[1:], strict=False)):
        return slice(slices[0].start, slices[-1].stop)
    return torch.cat([torch.arange(one.start, one.stop) for one in slices]).to(device)
