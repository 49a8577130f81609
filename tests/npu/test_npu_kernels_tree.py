"""Attention over shared beginnings by torch_npu's packed operators, merged, over the stand-in for CANN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from npu_vlrl import kernels
from npu_vlrl.kernels import reference
from npu_vlrl.kernels.tree import Tree
from tests.host_cann import counted
from tests.support.trees import grown

FORWARD = "aclnnFlashAttentionVarLenScore"
BACKWARD = "aclnnFlashAttentionUnpaddingScoreGrad"


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    kernels.use("npu")
    yield
    kernels.use("reference")


def run(tree: Tree, device: str, seed: int, change: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(h, tree.bounds[-1], 16, generator=generator) for h in (4, 2, 2)]
    leaves = [x.to(device).requires_grad_() for x in leaves]
    function = kernels.op("tree_attention") if device == "npu" else reference.tree_attention
    out = function(*leaves, Tree.of_sequences((0, tree.bounds[-1])) if change else tree, 0.25)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(device))
    return [out.detach().cpu(), *(x.grad.cpu() for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("seed", range(8))
def test_like_the_reference_forward_and_backward(seed: int) -> None:
    tree = grown(seed, sequences=6, longest=12)
    with counted() as ran:
        found = run(tree, "npu", seed)
    for ours, theirs in zip(found, run(tree, "cpu", seed), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    calls = len(tree.parts) if tree.shares else 1
    assert sum(n for name, n in ran.items() if name.startswith(FORWARD)) == calls
    assert sum(n for name, n in ran.items() if name.startswith(BACKWARD)) == calls
    assert not [name for name in ran if name.startswith("fallback::")]


def test_the_comparison_sees_a_token_that_looks_at_a_neighbour() -> None:
    tree = grown(1, sequences=6, longest=12)
    assert tree.shares
    gap = max((a - b).abs().max() for a, b in zip(run(tree, "npu", 1, change=True), run(tree, "cpu", 1), strict=True))
    assert gap > 1e-2


def test_without_anything_shared_it_is_one_packed_call() -> None:
    with counted() as ran:
        run(Tree.of_sequences((0, 3, 10)), "npu", 0)
    assert sum(n for name, n in ran.items() if name.startswith(FORWARD)) == 1
