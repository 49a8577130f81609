"""Tree attention in parts that are merged, forward and backward, against all tokens and one mask."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_vlrl.kernels import tree as trees
from npu_vlrl.kernels.reference import tree_attention as reference
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.kernels.tree_parts import tree_attention
from tests.support.trees import Dense, grown


def inputs(tree: Tree, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = tree.bounds[-1]
    return [
        torch.randn(heads, n, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]


def compare(tree: Tree, seed: int, fused: Dense) -> None:
    leaves = inputs(tree, seed)
    found = tree_attention(*leaves, tree, 0.4, fused)
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape)
    gradients = torch.autograd.grad(found, leaves, weight)
    expected = reference(*leaves, tree, 0.4)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_the_parts_together_are_the_whole(seed: int, sequences: int) -> None:
    compare(grown(seed, sequences), seed, Dense())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_many_sequences_take_several_calls(seed: int) -> None:
    with mock.patch.object(trees, "MOST_SEQUENCES", 2):
        tree = grown(seed, 8)
        assert all(len(part.queries) <= 2 for part in tree.parts)
        compare(tree, seed, Dense())


class OwnStatistics(Dense):
    """Differentiates a part as if no other keys were there."""

    def backward(self, grad, q, k, v, out, lse, cu_q, cu_k, causal, scale):  # type: ignore[no-untyped-def]
        out, lse = self.forward(q, k, v, cu_q, cu_k, causal, scale)
        return super().backward(grad, q, k, v, out, lse, cu_q, cu_k, causal, scale)


def test_the_comparison_sees_statistics_that_were_not_merged() -> None:
    tree = grown(3)
    assert tree.shares
    with pytest.raises(AssertionError):
        compare(tree, 0, OwnStatistics())
