"""The small fused operators of torch_npu on the stand-in, against the formulas in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_npu
from torch.nn import functional

from tests.host_cann import counted, small_ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(fused, reference, *inputs, kind=torch.float32):
    """The output and the gradient for each input."""
    inputs = [x.to(kind) for x in inputs]
    mine = [x.npu().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, want = fused(*mine), reference(*theirs)
    weight = draw(*want.shape, seed=7).to(kind)
    out.backward(weight.npu())
    want.backward(weight.double())
    bound = BOUNDS[kind]
    assert out.dtype == kind
    torch.testing.assert_close(out.detach().cpu().double(), want.detach(), rtol=bound, atol=bound)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad.cpu().double(), b.grad, rtol=4 * bound, atol=4 * bound)


def rms(x, gamma, epsilon=1e-6):
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    return x / (x.square().mean(dims, keepdim=True) + epsilon).sqrt() * gamma


def rotated(x):
    left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([-right, left], -1)


@pytest.mark.parametrize("kind", FLOATS)
def test_rms_norm(kind):
    compare(lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-6)[0], rms, draw(3, 5, 8), draw(8, seed=1), kind=kind)


def test_rms_norm_over_two_dimensions_and_its_statistics():
    compare(lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-6)[0], rms, draw(3, 5, 8), draw(5, 8, seed=1))
    x = draw(3, 8)
    rstd = torch_npu.npu_rms_norm(x.npu(), torch.ones(8).npu(), 0.5)[1]
    torch.testing.assert_close(rstd.cpu(), 1 / (x.square().mean(-1, keepdim=True) + 0.5).sqrt())


def test_rms_norm_takes_a_float32_weight_with_bfloat16():
    x, gamma = draw(3, 8).bfloat16(), draw(8, seed=1)
    y = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)[0]
    torch.testing.assert_close(y.cpu().double(), rms(x.double(), gamma.double()), rtol=2e-2, atol=2e-2)


def test_add_rms_norm():
    a, b, gamma = draw(3, 8), draw(3, 8, seed=1), draw(8, seed=2)
    y, _, x = torch_npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-6)
    torch.testing.assert_close(x.cpu(), a + b)
    torch.testing.assert_close(y.cpu(), rms(a + b, gamma), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(kind, dim):
    def reference(x):
        left, right = x.chunk(2, dim)
        return left * torch.sigmoid(left) * right

    compare(lambda x: torch_npu.npu_swiglu(x, dim=dim), reference, draw(3, 4, 8), kind=kind)


@pytest.mark.parametrize("shape", [(1, 5, 1, 64), (2, 5, 1, 64), (2, 5, 4, 64)])
def test_rotary_with_the_gradients_of_cos_and_sin(shape):
    compare(
        torch_npu.npu_rotary_mul,
        lambda x, c, s: x * c + rotated(x) * s,
        draw(2, 5, 4, 64),
        draw(*shape, seed=1),
        draw(*shape, seed=2),
    )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_rotary_in_half_precision(kind):
    cos, sin = draw(1, 5, 1, 80, seed=1).to(kind), draw(1, 5, 1, 80, seed=2).to(kind)
    compare(
        lambda x: torch_npu.npu_rotary_mul(x, cos.npu(), sin.npu()),
        lambda x: x * cos.double() + rotated(x) * sin.double(),
        draw(2, 5, 4, 80),
        kind=kind,
    )


def test_ring_attention_update_of_padded_sequences():
    """Two parts of the keys, merged by hand from their log-sum-exp."""
    outs, maxima = [draw(5, 2, 12, seed=i) for i in (0, 1)], [draw(2, 3, 5, 1, seed=i).abs() for i in (2, 3)]
    totals = [draw(2, 3, 5, 1, seed=i).abs() + 1 for i in (4, 5)]
    wide = [[x.expand(-1, -1, -1, 8).contiguous().npu() for x in pair] for pair in zip(maxima, totals, strict=True)]
    out, maximum, total = torch_npu.npu_ring_attention_update(
        outs[0].npu(), *wide[0], outs[1].npu(), *wide[1], input_layout="SBH"
    )
    lse = torch.stack([m + t.log() for m, t in zip(maxima, totals, strict=True)])
    share = (lse - lse.logsumexp(0)).exp().permute(0, 3, 1, 2, 4)  # [2, S, B, N, 1]
    want = sum(o.unflatten(-1, (3, 4)) * s for o, s in zip(outs, share, strict=True)).flatten(2)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((maximum + total.log()).cpu()[..., :1], lse.logsumexp(0), rtol=1e-5, atol=1e-5)


def train(optimiser, device, steps=4):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    model = copy.deepcopy(model).to(device)
    chosen = optimiser(model.parameters())
    for step in range(steps):
        chosen.zero_grad()
        model(draw(4, 6, seed=step).to(device)).square().sum().backward()
        chosen.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.3}])
def test_fused_adamw_of_torch(options):
    with counted() as count:
        mine = train(lambda p: torch.optim.AdamW(p, lr=0.05, fused=True, **options), "npu")
    theirs = train(lambda p: torch.optim.AdamW(p, lr=0.05, **options), "cpu")
    assert count["aclnnApplyAdamWV2"] == 4 * 2  # steps, parameters
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fused_adamw_of_torch_npu():
    mine = train(lambda p: torch_npu.optim.NpuFusedAdamW(p, lr=0.05), "npu")
    theirs = train(lambda p: torch.optim.AdamW(p, lr=0.05), "cpu")
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


X = draw(2, 5, 4, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch_npu.npu_rms_norm(draw(3, 8).npu(), draw(7).npu()), r"gamma \[7\] must be the last dimensions"),
        (lambda: torch_npu.npu_rms_norm(draw(3, 8).npu(), draw(8).half().npu()), "gamma is torch.float16"),
        (lambda: torch_npu.npu_rms_norm(draw(3, 8).double().npu(), draw(8).double().npu()), "not torch.float64"),
        (lambda: torch_npu.npu_rms_norm(draw(3, 8).npu(), draw(8).to("npu:1")), "gamma is on npu:1"),
        (lambda: torch_npu.npu_rms_norm(draw(3, 8).npu(), draw(8)), "in host memory|same device"),
        (lambda: torch_npu.npu_swiglu(draw(3, 7).npu()), "odd"),
        (lambda: torch_npu.npu_swiglu(torch.ones(3, 8, dtype=torch.int32).npu()), "int32"),
        (lambda: torch_npu.npu_rotary_mul(X.npu(), X[..., :32].npu(), X[..., :32].npu()), r"must be 1 or equal"),
        (lambda: torch_npu.npu_rotary_mul(X.npu(), X.npu(), X.npu(), "interleave"), "rotary mode 1 has no reference"),
        (lambda: torch_npu.npu_cross_entropy_loss(draw(3, 8).npu(), torch.tensor([1, 2, 3]).npu()), "CrossEntropyLoss"),
        (lambda: torch_npu.npu_silu(draw(3).npu()), "Swish|Silu"),
    ],
)
def test_refusals_name_what_is_wrong(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


def test_rotary_takes_one_type():
    """torch_npu converts cos and sin itself; the operator of CANN would not."""
    with pytest.raises(ValueError, match="one type is needed"):
        small_ops.rotary(X, X.half(), X.half(), 0, X)


def test_the_comparison_notices_a_wrong_formula():
    with pytest.raises(AssertionError):
        compare(torch_npu.npu_swiglu, lambda x: functional.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0], draw(3, 8))


def test_fused_operators_are_counted_by_their_aclnn_names():
    x, gamma = draw(3, 8).npu().requires_grad_(), draw(8).npu()
    with counted() as count:
        torch_npu.npu_swiglu(torch_npu.npu_rms_norm(x, gamma)[0]).sum().backward()
    fused = {name: n for name, n in count.items() if name.startswith("aclnn")}
    assert fused == {"aclnnRmsNorm": 1, "aclnnSwiGlu": 1, "aclnnSwiGluGrad": 1, "aclnnRmsNormGrad": 1}
    torch_npu.npu_swiglu(x)
    assert count["aclnnSwiGlu"] == 1  # nothing is counted outside
