"""Each op by torch_npu's fused operators, over the stand-in for CANN, against its reference on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npu_vlrl import kernels
from npu_vlrl.kernels import npu, parity, reference
from tests.host_cann import counted

TIGHT = 2e-5
"""Of the largest value, in float32: the same sums in another order."""
ROUNDED = 2**-7
"""The same in bfloat16, which keeps 8 bits: a fused operator rounds once where the reference may round three times."""


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    kernels.use("npu")
    yield
    kernels.use("reference")


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(function: Callable[..., Tensor], device: str, *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of all inputs, on the host, in float64. No gradient is one of zero."""
    leaves = [x.detach().to(device).requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(device, out.dtype))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [x.detach().cpu().double() for x in (out, *gradients)]


def assert_same(name: str, inputs: list[Tensor], *rest: Any, tolerance: float = TIGHT) -> Counter[str]:
    """Compares op and reference; returns what ran on the device."""
    with counted() as ran:
        found = run(lambda *x: kernels.op(name)(*x, *on("npu", rest)), "npu", *inputs)
    expected = run(lambda *x: getattr(reference, name)(*x, *rest), "cpu", *inputs)
    assert_close(found, expected, tolerance)
    assert not [key for key in ran if key.startswith("fallback::")]
    return ran


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        if ours.numel():  # what goes in is about 1, and differences of it may be anything down to 0
            assert float((ours - theirs).abs().max()) <= tolerance * max(float(theirs.abs().max()), 1)


def on(device: str, values: tuple[Any, ...]) -> list[Any]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def packed(
    q_lengths: list[int],
    k_lengths: list[int],
    heads: int,
    key_heads: int,
    width: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], list[int], list[int]]:
    """q, k and v [heads, tokens, width] as layers make them: tokens first in memory. And the boundaries."""
    shapes = [(sum(n), h, width) for n, h in ((q_lengths, heads), (k_lengths, key_heads), (k_lengths, key_heads))]
    inputs = [x.transpose(0, 1) for x in draw(*shapes, dtype=dtype)]
    return inputs, [0, *accumulate(q_lengths)], [0, *accumulate(k_lengths)]


class Seen(TorchDispatchMode):
    """The arguments, by name, of two of torch_npu's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("npu_rotary_mul", "npu_fusion_attention"):
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((name, dict(zip(names, args, strict=False)) | (kwargs or {})))
        return func(*args, **(kwargs or {}))


# --- packed attention ------------------------------------------------------------------------------------------------


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths in queries and keys, empty sequences among them."""
    queries = draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))
    if draw(st.booleans()):
        return queries, queries
    return queries, [n + draw(st.integers(0, 3)) for n in queries]


@settings(max_examples=40, deadline=None)
@given(sequences(), st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.sampled_from([4, 80]), st.booleans(), st.booleans())
def test_packed_attention(
    lengths: tuple[list[int], list[int]], heads: tuple[int, int], width: int, causal: bool, few: bool
) -> None:
    """`few`: a call takes no more than 3 sequences, as it really takes no more than 1024."""
    inputs, cu_q, cu_k = packed(*lengths, *heads, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npu, "MOST_SEQUENCES", 3 if few else 1024)
        npu._packing.cache_clear()
        assert_same("varlen_attention", inputs, cu_q, cu_k, causal, 0.3)
    npu._packing.cache_clear()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_takes_the_packed_layout(causal: bool, dtype: torch.dtype) -> None:
    inputs, cu_q, cu_k = packed([5, 2, 9], [5, 2, 9], 4, 2, 80, dtype)
    tolerance = TIGHT if dtype == torch.float32 else 2 * ROUNDED
    ran = assert_same("varlen_attention", inputs, cu_q, cu_k, causal, 80**-0.5, tolerance=tolerance)
    assert ran["aclnnFlashAttentionVarLenScore"] == ran["aclnnFlashAttentionUnpaddingScoreGrad"] == 1
    assert not ran["aclnnFlashAttentionScore"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[6, 6, 6], [11]])
@pytest.mark.parametrize("more_keys", [0, 3])
def test_equal_lengths_are_a_batch(causal: bool, lengths: list[int], more_keys: int) -> None:
    inputs, cu_q, cu_k = packed(lengths, [n + more_keys for n in lengths], 4, 2, 16)
    ran = assert_same("varlen_attention", inputs, cu_q, cu_k, causal, 0.25)
    assert ran["aclnnFlashAttentionScore"] == ran["aclnnFlashAttentionScoreGrad"] == 1
    assert not ran["aclnnFlashAttentionVarLenScore"]


def test_sequences_longer_than_the_compressed_mask() -> None:
    inputs, cu_q, cu_k = packed([513, 2100], [513, 2100], 1, 1, 4)
    assert_same("varlen_attention", inputs, cu_q, cu_k, True, 0.5)


def test_more_sequences_than_a_call_takes() -> None:
    lengths = [1, 2] * 1030
    inputs, cu_q, cu_k = packed(lengths, lengths, 1, 1, 4)
    ran = assert_same("varlen_attention", inputs, cu_q, cu_k, False, 0.5)
    assert ran["aclnnFlashAttentionVarLenScore"] == ran["aclnnFlashAttentionUnpaddingScoreGrad"] == 3


@pytest.mark.parametrize(("extra", "calls"), [(0, 1), (1, 2)])
def test_1024_sequences_are_one_call_and_1025_two(extra: int, calls: int) -> None:
    lengths = [1, 2] * 512 + [3] * extra
    inputs, cu_q, cu_k = packed(lengths, lengths, 1, 1, 4)
    ran = assert_same("varlen_attention", inputs, cu_q, cu_k, True, 0.5)
    assert ran["aclnnFlashAttentionVarLenScore"] == ran["aclnnFlashAttentionUnpaddingScoreGrad"] == calls


def test_without_the_split_the_stand_in_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [1, 2] * 512 + [3]
    inputs, cu_q, cu_k = packed(lengths, lengths, 1, 1, 4)
    monkeypatch.setattr(npu, "MOST_SEQUENCES", 2048)
    npu._packing.cache_clear()
    with pytest.raises(RuntimeError, match="1025 sequences.*at most 1024"):
        npu.varlen_attention(*on("npu", tuple(inputs)), cu_q, cu_k, True, 0.5)
    npu._packing.cache_clear()


def test_nothing_at_all() -> None:
    inputs, _, _ = packed([0], [0], 4, 2, 16)
    for boundaries in ([0, 0], [0, 0, 0], [0]):
        assert_same("varlen_attention", inputs, boundaries, boundaries, True, 0.25)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "causal", "message"),
    [
        ([3, 8], [0, 3, 8], True, "cu_q must rise from 0 to 8"),
        ([0, 3, 8], [0, 3, 7], True, "cu_k must rise from 0 to 8"),
        ([0, 8], [0, 3, 8], False, "cu_q has 1 sequences, cu_k has 2"),
        ([0, 5, 8], [0, 3, 8], True, "sequence 0 has 5 queries and 3 keys"),
        ([0, 3, 8], [0, 0, 8], False, "sequence 0 has 3 queries and 0 keys"),
    ],
)
def test_wrong_boundaries_are_refused_as_by_the_reference(
    cu_q: list[int], cu_k: list[int], causal: bool, message: str
) -> None:
    for device, function in (("npu", npu.varlen_attention), ("cpu", reference.varlen_attention)):
        q, k, v = (x.to(device) for x in draw((4, 8, 16), (2, 8, 16), (2, 8, 16)))
        with pytest.raises(ValueError, match=message):
            function(q, k, v, cu_q, cu_k, causal, 0.25)


def test_a_mask_first_made_without_autograd_serves_it_later() -> None:
    npu._future.cache_clear()
    inputs, cu_q, cu_k = packed([5, 2], [5, 2], 2, 2, 8)
    with torch.inference_mode():
        npu.varlen_attention(*on("npu", tuple(inputs)), cu_q, cu_k, True, 0.25)
    assert_same("varlen_attention", inputs, cu_q, cu_k, True, 0.25)


def test_the_causal_mask_is_made_once() -> None:
    npu._future.cache_clear()
    inputs, cu_q, cu_k = packed([5, 2], [5, 2], 2, 2, 8)
    with counted() as ran:
        for _ in range(3):
            npu.varlen_attention(*on("npu", tuple(inputs)), cu_q, cu_k, True, 0.25)
    assert ran["aten::triu"] == 1 and ran["aclnnFlashAttentionVarLenScore"] == 3


# --- what these comparisons would find -------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    fused = npu._fused
    monkeypatch.setattr(npu, "_fused", lambda *args, **options: fused(*args, **change(options)))


def ours(causal: bool = True) -> Counter[str]:
    inputs, cu_q, cu_k = packed([3, 5, 2], [3, 5, 2], 2, 1, 8)
    return assert_same("varlen_attention", inputs, cu_q, cu_k, causal, 0.25)


def test_a_missing_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours()
    spoil(monkeypatch, lambda options: {**options, "atten_mask": None})
    with pytest.raises(AssertionError):
        ours()


def test_a_mask_of_the_wrong_polarity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda options: {**options, "atten_mask": ~options["atten_mask"]})
    with pytest.raises(RuntimeError, match="True hides"):
        ours()


def test_another_alignment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, cu_q, cu_k = packed([3, 5, 2], [4, 7, 2], 2, 1, 8)
    assert_same("varlen_attention", inputs, cu_q, cu_k, True, 0.25)
    spoil(monkeypatch, lambda options: {**options, "sparse_mode": 2})
    with pytest.raises(AssertionError):
        assert_same("varlen_attention", inputs, cu_q, cu_k, True, 0.25)


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_that_are_not_cumulative_are_refused(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    def lengths(ends: list[int]) -> list[int]:
        return [b - a for a, b in pairwise([0, *ends])]

    spoil(
        monkeypatch,
        lambda options: {
            **options,
            "actual_seq_qlen": lengths(options["actual_seq_qlen"]),
            "actual_seq_kvlen": lengths(options["actual_seq_kvlen"]),
        },
    )
    with pytest.raises(RuntimeError, match="actual_seq_qlen"):
        ours(causal)


def test_other_boundaries_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda options: {**options, "actual_seq_qlen": [4, 8, 10], "actual_seq_kvlen": [4, 8, 10]})
    with pytest.raises(AssertionError):
        ours()


# --- attention with a mask -------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(0, 9))
def test_masked_attention(rows: int, queries: int, before: int, seed: int) -> None:
    """Rows that are padded on the left, of which the last tokens ask."""
    keys = before + queries
    inputs = draw((rows, 4, queries, 16), (rows, 2, keys, 16), (rows, 2, keys, 16))
    padding = torch.randint(0, before + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    column, row = torch.arange(keys), torch.arange(before, keys)
    mask = (column >= padding[:, None, None, None]) & (column <= row[:, None])
    ran = assert_same("masked_attention", inputs, mask, 0.25)
    assert ran["aclnnFlashAttentionScore"] == 1


def test_masked_attention_with_the_mask_of_the_wrong_polarity_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda options: {**options, "atten_mask": ~options["atten_mask"]})
    with pytest.raises(AssertionError):
        assert_same("masked_attention", draw(*[(1, 1, 4, 8)] * 3), torch.ones(4, 4).tril().bool()[None, None], 0.25)


def test_a_query_that_sees_nothing_gets_something_finite() -> None:
    q, k, v = draw((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8))
    mask = torch.ones(3, 3).tril(-1).bool()[None, None]
    with Seen() as seen:
        out = npu.masked_attention(*on("npu", (q, k, v, mask)), 0.25).cpu()
        npu.masked_attention(*on("npu", (q[:, :, 2:], k, v, mask[:, :, 2:])), 0.25)
    assert out.isfinite().all()
    assert [call.get("inner_precise", 0) for _, call in seen.calls] == [2, 0]  # decoding has no such queries
    torch.testing.assert_close(out[:, 1:], reference.masked_attention(q, k, v, mask, 0.25)[:, 1:])


# --- parts of layers -------------------------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, TIGHT), (torch.bfloat16, 2 * ROUNDED)], ids=["float32", "bfloat16"]
)


@DTYPES
@pytest.mark.parametrize("shape", [(7, 32), (2, 3, 4, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    ran = assert_same("rms_norm", draw(shape, shape[-1:], dtype=dtype), 1e-3, tolerance=tolerance)
    assert ran["aclnnRmsNorm"] == ran["aclnnRmsNormGrad"] == 1
    assert set(ran) <= {"aclnnRmsNorm", "aclnnRmsNormGrad", "aten::_to_copy"}


def angles(rows: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    half = torch.rand(rows, length, width // 2, generator=torch.Generator().manual_seed(0)) * 6
    both = torch.cat([half, half], -1)
    return both.cos(), both.sin()


@DTYPES
@pytest.mark.parametrize("wide", [True, False], ids=["in float32", "in the dtype of x"])
@pytest.mark.parametrize("shape", [(2, 5, 4, 16), (1, 9, 2, 80), (3, 1, 2, 8)])
def test_rotary(shape: tuple[int, ...], wide: bool, dtype: torch.dtype, tolerance: float) -> None:
    for rows in {1, shape[0]}:
        turns = [x if wide else x.to(dtype) for x in angles(rows, shape[1], shape[3])]
        ran = assert_same("rotary", draw(shape, dtype=dtype), *turns, tolerance=tolerance)
        assert ran["aclnnRotaryPositionEmbedding"] == ran["aclnnRotaryPositionEmbeddingGrad"] == 1


def test_rotary_of_halves_is_refused() -> None:
    cos, sin = (x[..., :4].to("npu") for x in angles(1, 3, 8))
    with pytest.raises(ValueError, match="rotary: cos"):
        npu.rotary(draw((1, 3, 2, 8))[0].to("npu"), cos, sin)


def test_documented_limits_are_kept() -> None:
    """Rotary takes fewer than 1000 rows and one dtype; packed attention takes 1024 sequences, given as ints."""
    with Seen() as seen:
        x = draw((1200, 1, 2, 8), dtype=torch.bfloat16)[0].to("npu")
        cos, sin = (turn.to("npu") for turn in angles(1200, 1, 8))
        npu.rotary(x, cos, sin)
        inputs, cu_q, cu_k = packed([1, 2] * 1030, [1, 2] * 1030, 1, 1, 4)
        npu.varlen_attention(*on("npu", tuple(inputs)), cu_q, cu_k, True, 0.5)
    (_, rotary), *attention = seen.calls
    assert rotary["input"].shape == (1, 1200, 2, 8)
    assert {rotary[name].dtype for name in ("input", "r1", "r2")} == {torch.float32}
    assert [len(call["actual_seq_qlen"]) for _, call in attention] == [1024, 1024, 12]
    for name, call in attention:
        assert (name, call["input_layout"], call["sparse_mode"]) == ("npu_fusion_attention", "TND", 3)
        assert call["atten_mask"].shape == (2048, 2048)
        ends = call["actual_seq_qlen"]
        assert all(type(end) is int for end in ends) and ends[0] > 0 and ends[-1] == len(call["query"])


@DTYPES
def test_swiglu(dtype: torch.dtype, tolerance: float) -> None:
    ran = assert_same("swiglu", draw((2, 5, 12), (2, 5, 12), dtype=dtype), tolerance=tolerance)
    assert ran["aclnnSwiGlu"] == ran["aclnnSwiGluGrad"] == 1


def test_swiglu_with_its_halves_exchanged_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = draw((5, 12), (5, 12))
    assert not torch.allclose(npu.swiglu(up.npu(), gate.npu()).cpu(), reference.swiglu(gate, up))


@DTYPES
@pytest.mark.parametrize("with_bias", [True, False])
def test_patch_embed(with_bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    inputs = draw((7, 24), (6, 3, 2, 2, 2), *([(6,)] if with_bias else []), dtype=dtype)
    ran = assert_same("patch_embed", inputs, *([] if with_bias else [None]), tolerance=tolerance)
    assert not [name for name in ran if "conv" in name]


def test_add_at() -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    with counted() as ran:
        x, rows = (leaf.to("npu") for leaf in draw((2, 3, 4), (3, 4)))
        on_device = mask.to("npu")
        for _ in range(3):
            x = npu.add_at(x, on_device, rows)
    assert ran["aten::nonzero"] == 1 and ran["aten::index_add"] == 3
    inputs = draw((2, 3, 4), (3, 4))
    results = [
        run(lambda x, rows: function(x, mask.to(x.device), rows), device, *inputs)  # noqa: B023
        for function, device in ((npu.add_at, "npu"), (reference.add_at, "cpu"))
    ]
    assert_close(*results, TIGHT)


# --- log-probability, optimiser, the doctor's check ------------------------------------------------------------------


@DTYPES
def test_logprob_entropy_runs_by_what_devices_have(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight = draw((9, 16), (40, 16), dtype=dtype)
    targets, forbidden = torch.arange(9) * 4, torch.arange(40) % 5 == 1

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        target, banned = targets.to(hidden.device), forbidden.to(hidden.device)
        return torch.stack(reference.logprob_entropy(hidden, weight, target, 0.7, banned, 4))

    with counted() as ran:
        found = run(both, "npu", hidden, weight)
    for got, expected in zip(found, run(both, "cpu", hidden, weight), strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance * float(expected.abs().max()), rtol=0)
    assert not [name for name in ran if name.startswith("fallback::") or "index_put" in name]
    assert not ran["aten::_local_scalar_dense"]


def test_a_product_is_added_by_torch_npus_operator() -> None:
    """Without MindSpeed: that of ATB. The same check runs on MindSpeed's in tests/kernels/test_mindspeed.py."""
    left, right = draw((300, 8), (300, 5), dtype=torch.bfloat16)
    total = torch.ones(8, 5).npu()
    with counted() as ran:
        kernels.op("add_product")(total, left.npu(), right.npu())
    assert ran["AtbLinear"] == 1 and not [name for name in ran if name.startswith("fallback::")]
    torch.testing.assert_close(total.cpu(), 1 + left.float().T @ right.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_optimiser(dtype: torch.dtype) -> None:
    """One operator a tensor, nothing copied to the host, and the same weights as on the CPU."""
    host = [torch.nn.Parameter(x) for x in draw((4, 6), (5,), dtype=dtype)]
    device = [torch.nn.Parameter(x.detach().to("npu")) for x in host]
    optimisers = [torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, fused=True) for p in (host, device)]
    for step in range(3):
        for a, b in zip(host, device, strict=True):
            a.grad = draw(tuple(a.shape), dtype=dtype)[0] * (step + 1)
            b.grad = a.grad.to("npu")
        optimisers[0].step()
        with counted() as ran:
            optimisers[1].step()
        assert ran["aclnnApplyAdamWV2"] == 2
        assert not ran["aten::_local_scalar_dense"] and not [name for name in ran if name.startswith("fallback::")]
    for a, b in zip(host, device, strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 2 * ROUNDED
        torch.testing.assert_close(b.detach().cpu(), a.detach(), atol=tolerance, rtol=tolerance)


def test_the_check_of_the_doctor() -> None:
    lines = parity.check(torch.device("npu"))
    assert len(lines) == 2 * len(kernels.active()) and all(line.ok for line in lines)
    fused = {name for name, platform in kernels.active().items() if platform == "npu"}
    assert all(line.forward + line.backward < 1e-5 for line in lines if "bfloat16" not in line.op)
    # Not trivially: a fused operator differs from the reference in the last bits, somewhere.
    assert fused and any(line.forward + line.backward > 0 for line in lines if line.op in fused)
