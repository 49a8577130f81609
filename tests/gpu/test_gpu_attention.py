"""Attention on a CUDA device, against the reference in float32 there, at small and at real sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from npu_vlrl import kernels
from npu_vlrl.kernels import cuda, reference
from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.table import reference_of
from npu_vlrl.kernels.tree import Tree
from tests.support.trees import grown

PRECISION = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Relative error of a whole tensor: inputs are exact, probabilities and sums are rounded."""


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    kernels.use("cuda")
    yield
    kernels.use("reference")
    torch.cuda.empty_cache()


def drawn(
    n_queries: int, n_keys: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2), width: int = 16
) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(n_queries)
    shapes = [(heads[0], n_queries, width), (heads[1], n_keys, width), (heads[1], n_keys, width)]
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def run(call: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = call(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def compare(name: str, inputs: Sequence[Tensor], *rest: object) -> float:
    dtype = inputs[0].dtype
    found = run(lambda *x: kernels.op(name)(*x, *rest), inputs, dtype)
    wanted = run(lambda *x: reference_of(name)(*x, *rest), inputs, torch.float32)
    assert all(x.dtype == dtype for x in found) and len(found) == 4
    return max(map(gap, found, wanted))


def test_attention_is_fused() -> None:
    active = kernels.active()
    assert {active[name] for name in ("varlen_attention", "tree_attention", "decode_attention")} == {"cuda"}


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cu_q, cu_k", [([0, 3, 4, 130], [0, 3, 4, 130]), ([0, 2, 70], [0, 9, 200])])
def test_varlen(cu_q: list[int], cu_k: list[int], causal: bool, dtype: torch.dtype) -> None:
    inputs = drawn(cu_q[-1], cu_k[-1], dtype)
    assert compare("varlen_attention", inputs, cu_q, cu_k, causal, 0.25) < PRECISION[dtype]


def test_windows_of_a_tower() -> None:
    """16 heads of 80, windows of 64 patches and smaller ones at the edge."""
    cu = [0, *range(64, 64 * 20 + 1, 64), 64 * 20 + 32, 64 * 20 + 48]
    assert (
        compare("varlen_attention", drawn(cu[-1], cu[-1], torch.bfloat16, (16, 16), 80), cu, cu, False, 80**-0.5)
        < 2**-6
    )


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_tree(seed: int, dtype: torch.dtype) -> None:
    tree = grown(seed, sequences=6, longest=40)
    assert tree.shares
    assert compare("tree_attention", drawn(tree.bounds[-1], tree.bounds[-1], dtype), tree, 0.25) < PRECISION[dtype]


def group(prompt: int, answers: Sequence[int]) -> Tree:
    ends = [prompt]
    for answer in answers:
        ends.append(ends[-1] + answer)
    return Tree((0, *ends[:-1]), (ends[-1], *ends[1:]))


def test_tree_of_a_real_group() -> None:
    """A prompt of 520 tokens and 8 answers, heads of Qwen2.5-VL-3B."""
    tree = group(520, [128, 300, 64, 1, 77, 512, 256, 130])
    inputs = drawn(tree.bounds[-1], tree.bounds[-1], torch.bfloat16, (16, 2), 128)
    assert compare("tree_attention", inputs, tree, 128**-0.5) < PRECISION[torch.bfloat16]


def test_the_comparison_sees_what_looks_at_a_neighbour() -> None:
    tree = group(20, [10, 30])
    inputs = drawn(60, 60, torch.bfloat16)
    found = run(lambda *x: cuda.tree_attention(*x, Tree.of_sequences((0, 60)), 0.25), inputs, torch.bfloat16)
    wanted = run(lambda *x: reference.tree_attention(*x, tree, 0.25), inputs, torch.float32)
    assert max(map(gap, found, wanted)) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, *PRECISION], ids=str)
@pytest.mark.parametrize("news", [[1] * 5, [3] * 5, [1, 4, 2, 7, 3]], ids=str)
def test_kept(news: list[int], dtype: torch.dtype) -> None:
    """Rows of different length in room for 300; what stands beyond them must not matter."""
    lengths = torch.tensor([300, 17, 200, 64, 7], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(16, sum(news), 128, generator=generator, device="cuda", dtype=dtype)
    keys, values = (torch.randn(5, 300, 2, 128, generator=generator, device="cuda", dtype=dtype) for _ in range(2))
    rows = CacheRows.of(lengths, news, 300, 300)
    found = kernels.op("decode_attention")(q, keys, values, rows, 0.1)
    wanted = reference.decode_attention(q.float(), keys.float(), values.float(), rows, 0.1)
    assert gap(found, wanted) < PRECISION.get(dtype, 1e-5)
    for row, length in enumerate(lengths.tolist()):
        keys[row, length:], values[row, length:] = 1e4, 1e4
    assert torch.equal(kernels.op("decode_attention")(q, keys, values, rows, 0.1), found)
