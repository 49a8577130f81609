"""Fused attention of torch_npu on the stand-in, against attention written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu

from tests.host_cann import counted
from tests.host_cann.small_ops import _rotate

N, N_KV, D = 4, 2, 16
HIDE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LENGTHS = (5, 7, 1)
ENDS = [5, 12, 13]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def plain(q, k, v, visible=None, scale=None):
    """[S, N, D] in float64; `visible` [S_q, S_kv]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores


def both(fused, reference, *inputs):
    """Outputs and gradients of the fused operator on the device and of the reference on the CPU."""
    results = []
    for run, device in ((fused, "npu"), (reference, "cpu")):
        leaves = [x.detach().to(device).requires_grad_() for x in inputs]
        out = run(*leaves)
        out.backward(draw(*out.shape, seed=9).to(device, out.dtype))
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    return results


def assert_same(results, tolerance=2e-5):
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, S, N, D] as `layout`."""
    return {
        "BSND": x,
        "BNSD": x.transpose(1, 2),
        "BSH": x.flatten(2),
        "SBH": x.flatten(2).transpose(0, 1),
    }[layout]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH", "SBH"])
def test_padded_layouts_with_shared_key_heads(layout, contiguous):
    def fused(q, k, v):
        parts = [to_layout(x, layout) for x in (q, k, v)]
        parts = [x.contiguous() if contiguous else x for x in parts]
        mask = HIDE.npu()
        out = torch_npu.npu_fusion_attention(*parts, N, layout, scale=D**-0.5, sparse_mode=3, atten_mask=mask)[0]
        if layout == "BNSD":
            return out.transpose(1, 2)
        return out if layout == "BSND" else (out if layout == "BSH" else out.transpose(0, 1)).unflatten(-1, (N, D))

    def reference(q, k, v):
        visible = torch.ones(6, 6, dtype=torch.bool).tril()
        return torch.stack([plain(*rows, visible)[0] for rows in zip(q, k, v, strict=True)])

    assert_same(both(fused, reference, draw(2, 6, N, D), draw(2, 6, N_KV, D, seed=1), draw(2, 6, N_KV, D, seed=2)))


@pytest.mark.parametrize(("mode", "mask"), [(3, HIDE), (2, HIDE), (0, None)])
@pytest.mark.parametrize("d", [16, 80])
def test_packed_sequences(mode, mask, d):
    def fused(q, k, v):
        hide = None if mask is None else mask.npu()
        ends = {"actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS}
        return torch_npu.npu_fusion_attention(
            q, k, v, N, "TND", scale=d**-0.5, sparse_mode=mode, atten_mask=hide, **ends
        )[0]

    def reference(q, k, v):
        outs = []
        for rows in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
            visible = None if mask is None else torch.ones(len(rows[0]), len(rows[0]), dtype=torch.bool).tril()
            outs.append(plain(*rows, visible)[0])
        return torch.cat(outs)

    assert_same(both(fused, reference, draw(13, N, d), draw(13, N_KV, d, seed=1), draw(13, N_KV, d, seed=2)))


def test_a_sequence_may_be_empty():
    q, k, v = (draw(13, N, D, seed=i).npu() for i in range(3))
    same = {"scale": 0.25, "actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS}
    more = {"scale": 0.25, "actual_seq_qlen": [5, 5, 12, 13], "actual_seq_kvlen": [5, 5, 12, 13]}
    without = torch_npu.npu_fusion_attention(q, k, v, N, "TND", **same)[0]
    assert torch.equal(without.cpu(), torch_npu.npu_fusion_attention(q, k, v, N, "TND", **more)[0].cpu())


def visible_of(mode, rows, columns, before, after, mask):
    """What a query sees, position by position, by the words of the documents."""
    see = torch.zeros(rows, columns, dtype=torch.bool)
    for i in range(rows):
        for j in range(columns):
            if mode == 2:
                see[i, j] = j <= i
            elif mode == 3:
                see[i, j] = j <= i + columns - rows
            elif mode == 4:
                see[i, j] = i + columns - rows - before <= j <= i + columns - rows + after
            else:
                see[i, j] = not mask[i, j]
    return see


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 7)])
def test_sparse_modes(mode, rows, columns):
    before, after = (2, 1) if mode == 4 else (2147483647, 2147483647)
    own = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) > 0.6
    own[:, 0] = False
    mask = own if mode < 2 else HIDE

    def fused(q, k, v):
        return torch_npu.npu_fusion_attention(
            q,
            k,
            v,
            N,
            "BSND",
            scale=0.3,
            sparse_mode=mode,
            atten_mask=mask.npu(),
            pre_tockens=before,
            next_tockens=after,
        )[0]

    def reference(q, k, v):
        return plain(q[0], k[0], v[0], visible_of(mode, rows, columns, before, after, own), 0.3)[0][None]

    assert_same(
        both(fused, reference, draw(1, rows, N, D), draw(1, columns, N, D, seed=1), draw(1, columns, N, D, seed=2))
    )


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(6, 6), (1, 1, 6, 6), (2, 1, 6, 6), (2, N, 6, 6)])
def test_masks_of_every_documented_shape(shape, kind):
    hide = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) > 0.5
    hide[..., 0] = False
    q, k, v = (draw(2, N, 6, D, seed=i) for i in range(3))
    out = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), N, "BNSD", scale=0.25, sparse_mode=1, atten_mask=hide.to(kind).npu()
    )[0]
    scores = (q.double() @ k.double().mT * 0.25).masked_fill(hide.expand(2, N, 6, 6), -math.inf)
    torch.testing.assert_close(out.cpu().double(), scores.softmax(-1) @ v.double(), rtol=1e-5, atol=1e-5)


def test_true_hides():
    """With the mask turned round, the result is another one."""
    x = draw(1, 4, N, D).npu()
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    outs = [
        torch_npu.npu_fusion_attention(x, x, x, N, "BSND", sparse_mode=1, atten_mask=m.npu())[0].cpu()
        for m in (mask, ~mask.T.tril(-1).T)
    ]
    assert torch.allclose(outs[0][0, 0], x[0, 0].cpu(), atol=1e-6)  # the first query sees the first key only
    assert not torch.allclose(outs[0], outs[1], atol=1e-2)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_types(kind):
    q, k, v = (draw(13, N, D, seed=i).to(kind) for i in range(3))
    out = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), N, "TND", scale=0.25, actual_seq_qlen=ENDS, actual_seq_kvlen=ENDS
    )[0]
    want = torch.cat([plain(*rows, scale=0.25)[0] for rows in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)])
    assert out.dtype == kind
    bound = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}[kind]
    torch.testing.assert_close(out.cpu().double(), want, rtol=bound, atol=bound)


def log_sum_exp(maximum, total):
    return (maximum + total.log())[..., 0].cpu()


@pytest.mark.parametrize("layout", ["", "TND"])
def test_statistics_of_packed_sequences(layout):
    """[T, N, 8]; unless softmax_layout is TND, each sequence's part of the memory is [N, S, 8]."""
    q, k, v = (draw(13, N, D, seed=i) for i in range(3))
    _, maximum, total, *_ = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), N, "TND", scale=0.25, actual_seq_qlen=ENDS, actual_seq_kvlen=ENDS,
        softmax_layout=layout,
    )  # fmt: skip
    assert maximum.shape == total.shape == (13, N, 8)
    assert maximum.dtype == torch.float32
    found, start = log_sum_exp(maximum, total), 0
    for length, *rows in zip(LENGTHS, *(x.split(LENGTHS) for x in (q, k)), strict=True):
        want = plain(*rows, rows[1], scale=0.25)[1].logsumexp(-1)  # [N, S]
        part = found[start : start + length]
        part = part.T if layout == "TND" else part.reshape(N, length)
        torch.testing.assert_close(part.double(), want, rtol=1e-5, atol=1e-5)
        start += length


def test_statistics_of_padded_sequences():
    q, k = draw(2, 6, N, D), draw(2, 6, N, D, seed=1)
    _, maximum, total, *_ = torch_npu.npu_fusion_attention(q.npu(), k.npu(), k.npu(), N, "BSND", scale=0.25)
    assert maximum.shape == (2, N, 6, 8)
    want = torch.einsum("bind,bjnd->bnij", q.double(), k.double()).mul(0.25).logsumexp(-1)
    torch.testing.assert_close(log_sum_exp(maximum, total).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["", "TND"])
def test_a_prefix_and_a_suffix_are_merged_and_differentiated_part_by_part(layout):
    """As in ring attention: the backward of each part takes the merged statistics and the merged output."""
    d = 64
    q, k, v, g = (draw(6, N, d, seed=i).npu() for i in range(4))
    split = 4
    keys = {
        "prefix": (k[:split].contiguous(), v[:split].contiguous()),
        "suffix": (k[split:].contiguous(), v[split:].contiguous()),
    }
    ends = {name: {"actual_seq_qlen": [6], "actual_seq_kvlen": [len(part[0])]} for name, part in keys.items()}
    parts = {
        name: torch_npu.npu_fusion_attention(q, *part, N, "TND", scale=0.125, softmax_layout=layout, **ends[name])[:3]
        for name, part in keys.items()
    }
    merged = torch_npu.npu_ring_attention_update(
        *parts["prefix"], *parts["suffix"], actual_seq_qlen=torch.tensor([0, 6]).npu(), input_layout="TND",
        input_softmax_layout=layout,
    )  # fmt: skip
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    want, _ = plain(*leaves, scale=0.125)
    want.backward(g.cpu().double())
    torch.testing.assert_close(merged[0].cpu().double(), want.detach(), rtol=1e-5, atol=1e-5)

    grads = {
        name: torch_npu.npu_fusion_attention_grad(
            q, *part, g, N, "TND", softmax_max=merged[1], softmax_sum=merged[2], attention_in=merged[0],
            scale_value=0.125, softmax_layout=layout, **ends[name],
        )
        for name, part in keys.items()
    }  # fmt: skip
    for index, combine in ((0, torch.add), (1, lambda a, b: torch.cat([a, b])), (2, lambda a, b: torch.cat([a, b]))):
        got = combine(grads["prefix"][index], grads["suffix"][index]).cpu().double()
        torch.testing.assert_close(got, leaves[index].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changed", ["softmax_max", "softmax_sum", "attention_in"])
def test_the_backward_uses_the_statistics_that_it_is_given(changed):
    q, k, v, g = (draw(1, 5, N, D, seed=i).npu() for i in range(4))
    out, maximum, total, *_ = torch_npu.npu_fusion_attention(q, k, v, N, "BSND", scale=0.25)
    given = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out}

    def backward(**values):
        return torch_npu.npu_fusion_attention_grad(q, k, v, g, N, "BSND", scale_value=0.25, **values)[0].cpu()

    assert not torch.allclose(backward(**given), backward(**given | {changed: given[changed] + 0.5}), atol=1e-3)


def test_scaled_dot_product_attention_of_torch_runs_fused():
    q, k, v = (draw(1, N, 6, D, seed=i).to(torch.bfloat16) for i in range(3))
    leaves = [x.npu().requires_grad_() for x in (q, k, v)]
    with counted() as count:
        torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    assert count["aclnnFlashAttentionScore"] == count["aclnnFlashAttentionScoreGrad"] == 1
    assert not [name for name in count if name.startswith("fallback")]


def test_scaled_dot_product_attention_is_fused_without_gradients_too():
    q, k, v = (draw(1, N, 6, D, seed=i).npu() for i in range(3))
    with counted() as count, torch.inference_mode():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert count["aclnnFlashAttentionScore"] == 1
    want = torch.nn.functional.scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu())
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)


# ---- refusals: what the documents rule out ---------------------------------------------------------------------------

MANY = [5] * 1024 + [13]  # all but the first and the last are empty
PACKED = {"actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS}
X = draw(13, N, D)
Y = draw(1, 6, N, D)
FULL_ROW = torch.zeros(6, 6, dtype=torch.bool).index_fill(0, torch.tensor([2]), True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atten_mask": HIDE[:13, :13], "sparse_mode": 3}, r"compressed atten_mask \[2048, 2048\], not \[13, 13\]"),
        ({"atten_mask": ~HIDE, "sparse_mode": 3}, "must be triu"),
        ({"atten_mask": HIDE.T.contiguous(), "sparse_mode": 2}, "sparse_mode 2: the compressed"),
        ({"atten_mask": HIDE.float(), "sparse_mode": 3}, "bool or uint8"),
        ({"atten_mask": HIDE, "sparse_mode": 6, "prefix": [1, 1, 1]}, "prefix has no reference"),
        ({"atten_mask": HIDE, "sparse_mode": 5}, "sparse_mode value must be in range"),
        ({"actual_seq_qlen": [5, 12, 12], "actual_seq_kvlen": [5, 12, 12]}, "ends at 12, but there are 13 tokens"),
        ({"actual_seq_qlen": [7, 5, 13]}, "must not decrease"),
        ({"actual_seq_qlen": [5, 13]}, "must be the same|differ in length"),
        ({"actual_seq_qlen": MANY, "actual_seq_kvlen": MANY}, "actual_seq_qlen has 1025 sequences.* at most 1024"),
        ({"keep_prob": 0.9}, "StatelessDropOutGenMask has no stand-in"),
        ({"pse": torch.zeros(1, N, 1024, 13)}, "pse"),
    ],
)
def test_packed_refusals(change, message):
    options = {**PACKED, **change}
    options = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_fusion_attention(X.npu(), X.npu(), X.npu(), N, "TND", **options)


@pytest.mark.parametrize(
    ("tensors", "heads", "layout", "message"),
    [
        ((X[:, :3], X[:, :2], X[:, :2]), 3, "TND", "3 query heads do not share 2 key heads"),
        ((X, X, X), 2, "TND", "head_num is 2, but the query has 4 heads"),
        ((X.double(), X.double(), X.double()), N, "TND", "float64"),
        ((X, X.half(), X.half()), N, "TND", "one type of float16, bfloat16 and float32"),
        ((draw(13, 1, 769),) * 3, 1, "TND", "D = 769|768"),
        ((X, X, X), N, "XYZ", "XYZ"),
    ],
)
def test_tensors_that_are_refused(tensors, heads, layout, message):
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_fusion_attention(*(x.contiguous().npu() for x in tensors), heads, layout, **PACKED)


def test_a_query_that_sees_nothing_is_refused_when_packed():
    x = draw(6, N, D).npu()
    with pytest.raises(RuntimeError, match="hides every key from a query of sequence 0"):
        torch_npu.npu_fusion_attention(
            x, x, x, N, "TND", sparse_mode=1, atten_mask=FULL_ROW.npu(), actual_seq_qlen=[6], actual_seq_kvlen=[6]
        )


def test_a_query_that_sees_nothing_gives_nothing_when_padded():
    x = Y.npu().requires_grad_()
    out = torch_npu.npu_fusion_attention(x, x, x, N, "BSND", sparse_mode=1, atten_mask=FULL_ROW.npu())[0]
    out.sum().backward()
    assert not out[0, 2].any()
    assert torch.isfinite(x.grad).all()


def test_more_queries_than_keys_are_refused_in_mode_3():
    q, k = draw(6, N, D).npu(), draw(4, N, D).npu()
    with pytest.raises(RuntimeError, match="sequence 0 has 6 queries and only 4 keys"):
        torch_npu.npu_fusion_attention(
            q, k, k, N, "TND", sparse_mode=3, atten_mask=HIDE.npu(), actual_seq_qlen=[6], actual_seq_kvlen=[4]
        )


def test_a_window_that_contradicts_the_mask_is_refused():
    x, nothing = Y.npu(), torch.zeros(6, 6, dtype=torch.bool).npu()
    with pytest.raises(RuntimeError, match="leave out what atten_mask does not hide"):
        torch_npu.npu_fusion_attention(
            x, x, x, N, "BSND", sparse_mode=0, atten_mask=nothing, pre_tockens=2, next_tockens=0
        )


def test_torch_npu_checks_its_own_arguments():
    x = Y.npu()
    with pytest.raises(RuntimeError, match="keep_prob"):
        torch_npu.npu_fusion_attention(x, x, x, N, "BSND", keep_prob=-1.0)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch_npu.npu_fusion_attention(x, x, x, N, "BSND", sparse_mode=3, atten_mask=HIDE)
    with pytest.raises(RuntimeError, match=r"Optional\[List\[int\]\]"):
        torch_npu.npu_fusion_attention(X.npu(), X.npu(), X.npu(), N, "TND", actual_seq_qlen=torch.tensor(ENDS))


def test_versions_of_the_operator_that_have_no_stand_in_are_named():
    x = Y.npu()
    with pytest.raises(RuntimeError, match="aclnnFlashAttentionScoreV2"):
        torch_npu.npu_fusion_attention_v2(x, x, x, N, "BSND")


def test_tensors_of_two_devices_are_refused():
    x, other = Y.npu(), Y.to("npu:1")
    with pytest.raises(RuntimeError, match="same device|on device 1"):
        torch_npu.npu_fusion_attention(x, other, x, N, "BSND")


def test_the_reference_notices_a_wrong_kernel():
    """Rotated queries are not the queries."""
    results = both(
        lambda q: torch_npu.npu_fusion_attention(_rotate(q), q, q, N, "BSND", scale=0.25)[0],
        lambda q: plain(q[0], q[0], q[0], scale=0.25)[0][None],
        Y,
    )
    with pytest.raises(AssertionError):
        assert_same(results)
