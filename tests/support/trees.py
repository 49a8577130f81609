"""Trees for tests of attention, and packed attention with statistics in plain sums."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner.tree import share


def grown(seed: int, sequences: int = 5, longest: int = 9) -> Tree:
    """The tree of sequences of few values, which have beginnings in common."""
    rng = random.Random(seed)
    lists = [[rng.randint(0, 1) for _ in range(rng.randint(1, longest))] for _ in range(sequences)]
    return share([np.array(one) for one in lists]).tree


def last_seer(tree: Tree) -> list[int]:
    """One past the last token that sees each token."""
    return [end for node, end in zip(tree.nodes, tree.ends, strict=True) for _ in range(node.start, node.stop)]


class Dense:
    """See `tree_parts.Fused`; sequence by sequence, all scores at once."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            scores = self._scores(q[a:b], k[c:d], causal, scale)
            lse[a:b] = scores.logsumexp(-1).T
            out[a:b] = torch.einsum("hts,shd->thd", scores.softmax(-1), self._spread(v[c:d], q))
        return out, lse

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
        """The share of these keys in the gradients, by hand: dS = P (dP - rowsum(dO O))."""
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            keys, values, g = self._spread(k[c:d], q), self._spread(v[c:d], q), grad[a:b]
            p = (self._scores(q[a:b], k[c:d], causal, scale) - lse[a:b].T[..., None]).exp()
            ds = p * (torch.einsum("thd,shd->hts", g, values) - (g * out[a:b]).sum(-1).T[..., None]) * scale
            found[0][a:b] = torch.einsum("hts,shd->thd", ds, keys)
            groups = (d - c, k.shape[1], -1, k.shape[2])
            found[1][c:d] = torch.einsum("hts,thd->shd", ds, q[a:b]).reshape(groups).sum(2)
            found[2][c:d] = torch.einsum("hts,thd->shd", p, g).reshape(groups).sum(2)
        return found[0], found[1], found[2]

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = torch.einsum("thd,shd->hts", q, self._spread(k, q)) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf) if causal else scores

    @staticmethod
    def _spread(x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
