"""Packed attention against the definition, written as loops over queries and keys."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.kernels.reference import varlen_attention

torch.set_num_threads(1)


def by_hand(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_q: list[int], cu_k: list[int], causal: bool, scale: float
) -> np.ndarray:
    out = np.zeros((q.shape[1], q.shape[0], v.shape[2]))
    group = q.shape[0] // k.shape[0]
    for b in range(len(cu_q) - 1):
        n_q, n_k = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        for i in range(n_q):
            last = n_k - n_q + i if causal else n_k - 1
            keys = slice(cu_k[b], cu_k[b] + last + 1)
            for h in range(q.shape[0]):
                scores = k[h // group, keys] @ q[h, cu_q[b] + i] * scale
                weights = np.exp(scores - scores.max())
                out[cu_q[b] + i, h] = weights @ v[h // group, keys] / weights.sum()
    return out


def tensors(heads: int, key_heads: int, n_q: int, n_k: int, width: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, n_q, width), (key_heads, n_k, width), (key_heads, n_k, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int, bool]:
    extra = st.integers(0, 3) if draw(st.booleans()) else st.just(0)
    q_lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    k_lengths = [n + draw(extra) for n in q_lengths]
    key_heads = draw(st.sampled_from([1, 2]))
    heads = key_heads * draw(st.sampled_from([1, 3]))
    return q_lengths, k_lengths, heads, key_heads, draw(st.sampled_from([1, 4])), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equals_the_definition(case: tuple[list[int], list[int], int, int, int, bool]) -> None:
    q_lengths, k_lengths, heads, key_heads, width, causal = case
    cu_q, cu_k = [0, *accumulate(q_lengths)], [0, *accumulate(k_lengths)]
    q, k, v = tensors(heads, key_heads, cu_q[-1], cu_k[-1], width)
    out = varlen_attention(q, k, v, cu_q, cu_k, causal, 0.7)
    expected = by_hand(q.detach().numpy(), k.detach().numpy(), v.detach().numpy(), cu_q, cu_k, causal, 0.7)
    assert out.shape == (cu_q[-1], heads, width)
    np.testing.assert_allclose(out.detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[3, 3], [1, 4, 4, 2]])
def test_gradients(lengths: list[int], causal: bool) -> None:
    cumulative = [0, *accumulate(lengths)]
    inputs = tensors(2, 1, cumulative[-1], cumulative[-1], 3)
    assert torch.autograd.gradcheck(lambda *qkv: varlen_attention(*qkv, cumulative, cumulative, causal, 0.5), inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_a_neighbour_full_of_nan_is_not_seen(causal: bool) -> None:
    cumulative = [0, 3, 5, 8]
    q, k, v = tensors(2, 2, 8, 8, 4)
    clean = varlen_attention(q, k, v, cumulative, cumulative, causal, 0.5)
    with torch.no_grad():
        for x in (q, k, v):
            x[:, 3:5] = torch.nan
    dirty = varlen_attention(q, k, v, cumulative, cumulative, causal, 0.5)
    keep = [0, 1, 2, 5, 6, 7]
    assert torch.equal(clean[keep], dirty[keep])
    assert dirty[3:5].isnan().all()
    dirty[keep].sum().backward()
    assert all(x.grad is not None and x.grad[:, keep].isfinite().all() for x in (q, k, v))


def test_boundaries_matter() -> None:
    q, k, v = tensors(2, 2, 8, 8, 4)
    right = varlen_attention(q, k, v, [0, 3, 8], [0, 3, 8], True, 0.5)
    wrong = varlen_attention(q, k, v, [0, 4, 8], [0, 4, 8], True, 0.5)
    torch.testing.assert_close(right[:3], wrong[:3], atol=1e-12, rtol=0)
    assert (right[3:] - wrong[3:]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions(dtype: torch.dtype) -> None:
    cumulative = [0, 3, 5, 8]
    inputs = [x.detach() for x in tensors(2, 1, 8, 8, 4)]
    wide = varlen_attention(*inputs, cumulative, cumulative, True, 0.5)
    narrow = varlen_attention(*(x.to(dtype) for x in inputs), cumulative, cumulative, True, 0.5)
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.double(), wide, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)


def test_no_sequence_at_all() -> None:
    q, k, v = tensors(2, 1, 0, 0, 4)
    assert varlen_attention(q, k, v, [0], [0], True, 0.5).shape == (0, 2, 4)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "causal", "message"),
    [
        ([0, 3], [0, 4], True, "cu_q must rise from 0 to 4"),
        ([1, 4], [0, 4], True, "cu_q must rise"),
        ([], [0, 4], True, "cu_q must rise"),
        ([0, 4], [0, 5, 4], True, "cu_k must rise"),
        ([0, 4], [0, 2, 4], True, "cu_q has 1 sequences, cu_k has 2"),
        ([0, 1, 4], [0, 2, 4], True, "sequence 1 has 3 queries and 2 keys"),
        ([0, 1, 4], [0, 0, 4], False, "sequence 0 has 1 queries and 0 keys"),
    ],
)
def test_wrong_lengths_are_refused(cu_q: list[int], cu_k: list[int], causal: bool, message: str) -> None:
    q, k, v = tensors(1, 1, 4, 4, 2)
    with pytest.raises(ValueError, match=message):
        varlen_attention(q, k, v, cu_q, cu_k, causal, 1.0)
