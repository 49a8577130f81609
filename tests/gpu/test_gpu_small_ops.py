"""The Triton parts of layers on a CUDA device, against the reference in float64, at the widths of Qwen2.5-VL-3B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from npu_vlrl import kernels
from npu_vlrl.kernels import modules, reference, table, triton_layers
from npu_vlrl.kernels.triton_layers import rms_norm, rotary, swiglu
from tests.kernels.test_attach import build, positions, some_pixels, text_model

# Relative error of a whole result: at most a few roundings of each number.
PRECISION = {torch.float32: 3e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
PARTS = ("rms_norm", "rotary", "swiglu")
EPSILON = 1e-6


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    kernels.use("cuda")
    yield
    kernels.use("reference")
    torch.cuda.empty_cache()


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def angles(batch: int, length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = draw(batch, length, width // 2, seed=5) * 100
    turns = torch.cat([turns, turns], -1)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def rms_in_float64(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def check(function: Callable[..., Tensor], wanted_from: Callable[..., Tensor], *inputs: Tensor) -> None:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    kept = [x.detach().clone() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, wanted = function(*inputs), wanted_from(*wide)
    grad = draw(*found.shape, dtype=found.dtype, seed=7)
    results = found, *torch.autograd.grad(found, inputs, grad)
    expected = wanted, *torch.autograd.grad(wanted, wide, grad.double())
    for value, exact in zip(results, expected, strict=True):
        assert value.dtype == inputs[0].dtype and value.shape == exact.shape
        assert relative(value.detach(), exact.detach()) < PRECISION[value.dtype]
    assert all(map(torch.equal, inputs, kept))


def test_the_kernels_are_in_use() -> None:
    assert {name: kernels.active()[name] for name in PARTS} == dict.fromkeys(PARTS, "cuda")
    assert [kernels.op(name) for name in PARTS] == [rms_norm, rotary, swiglu]


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 4099, 2048), (4096, 1280), (3, 700, 16, 128), (513, 2, 128), (64, 1, 2048), (7, 5120), (33, 100)],
    ids=str,
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(
        lambda x, weight: rms_norm(x, weight, EPSILON),
        lambda x, weight: rms_in_float64(x, weight, EPSILON),
        draw(*shape, dtype=dtype),
        draw(shape[-1], dtype=dtype, seed=1),
    )


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("shape", [(1, 2051, 11008), (4096, 3420), (64, 1, 11008), (3, 5), (17,)], ids=str)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(swiglu, reference.swiglu, draw(*shape, dtype=dtype), 2 * draw(*shape, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_gated_mlp(dtype: torch.dtype) -> None:
    """The tower of Qwen2.5-VL: 1280 wide, 3420 inside, with biases."""
    x = draw(700, 1280, dtype=dtype)
    maps = [(draw(3420, 1280, seed=1), draw(3420, seed=2)), (draw(3420, 1280, seed=3), draw(3420, seed=4))]
    maps.append((draw(1280, 3420, seed=5), draw(1280, seed=6)))
    parts = [(weight.to(dtype) / 32, bias.to(dtype)) for weight, bias in maps]
    found = kernels.op("gated_mlp")(x, *parts)
    wanted = reference.gated_mlp(x.double(), *((weight.double(), bias.double()) for weight, bias in parts))
    assert found.dtype == dtype and relative(found, wanted) < 4 * PRECISION[dtype]


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("heads", [16, 2])
@pytest.mark.parametrize("wide_angles", [True, False], ids=["cos in float32", "cos in the dtype"])
@pytest.mark.parametrize("size", [(1, 2051, 128), (64, 1, 128), (1, 4096, 80), (3, 5, 6)], ids=str)
def test_rotary(size: tuple[int, int, int], heads: int, wide_angles: bool, dtype: torch.dtype) -> None:
    """Errors against float64, and the bits of the reference: also where heads stand side by side with others."""
    batch, length, width = size
    cos, sin = angles(batch, length, width, torch.float32 if wide_angles else dtype)
    x = draw(batch, length, 3 * heads, width, dtype=dtype)[:, :, heads : 2 * heads]
    check(lambda x: rotary(x, cos, sin), lambda x: reference.rotary(x, cos.double(), sin.double()), x)
    leaves = [x.detach().requires_grad_() for _ in range(2)]
    found, wanted = rotary(leaves[0], cos, sin), reference.rotary(leaves[1], cos, sin)
    assert torch.equal(found, wanted)
    grad = draw(batch, heads, length, width, dtype=dtype, seed=7).transpose(1, 2)
    for out in (found, wanted):
        out.backward(grad)
    if cos.dtype == dtype:  # else the reference rounds parts of the gradient one by one
        assert torch.equal(leaves[0].grad, leaves[1].grad)
    one_row = rotary(x, cos[:1], sin[:1])
    assert torch.equal(one_row, reference.rotary(x, cos[:1], sin[:1]))


def test_what_no_kernel_takes_goes_to_the_reference() -> None:
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float64)):
        x, weight = torch.randn(3, 8, dtype=dtype, device=device), torch.randn(8, dtype=dtype, device=device)
        assert torch.equal(kernels.op("rms_norm")(x, weight, EPSILON), reference.rms_norm(x, weight, EPSILON))
        assert torch.equal(kernels.op("swiglu")(x, x), reference.swiglu(x, x))
    mixed = rms_norm(draw(3, 8, dtype=torch.bfloat16), draw(8), EPSILON)
    assert mixed.dtype == torch.float32
    assert rms_norm(draw(0, 8), draw(8), EPSILON).shape == (0, 8) and swiglu(draw(0, 8), draw(0, 8)).shape == (0, 8)


def cases(dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """One function of one tensor [64, 1, 16, 128] for each op."""
    weight, other, (cos, sin) = (
        draw(128, seed=1).to(dtype),
        draw(64, 1, 16, 128, seed=2).to(dtype),
        angles(64, 1, 128, dtype),
    )
    x = draw(64, 1, 16, 128, dtype=dtype)
    return {
        "rms_norm": (lambda x: rms_norm(x, weight, EPSILON), x),
        "rotary": (lambda x: rotary(x, cos, sin), x),
        "swiglu": (lambda x: swiglu(x, other), x),
    }


@pytest.mark.parametrize("name", PARTS)
def test_an_op_runs_inside_a_graph(name: str) -> None:
    """Replayed on new numbers, with and without its gradient."""
    function, x = cases()[name]
    still = x.clone()
    leaf, grad = x.clone().requires_grad_(), draw(*x.shape, dtype=x.dtype, seed=7)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles what is compiled at the first call
        with torch.no_grad():
            function(still)
        torch.autograd.grad(function(leaf), leaf, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with torch.no_grad():
            plain = function(still)
        (slope,) = torch.autograd.grad(function(leaf), leaf, grad)
    new = draw(*x.shape, dtype=x.dtype, seed=9)
    with torch.no_grad():
        still.copy_(new)
        leaf.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    fresh = new.clone().requires_grad_()
    assert torch.equal(plain, function(new)) and not torch.equal(plain, function(x))
    assert torch.equal(slope, torch.autograd.grad(function(fresh), fresh, grad)[0])


@pytest.mark.parametrize("name", PARTS)
def test_bits_repeat_whatever_runs_around(name: str) -> None:
    """Checkpointing, inference mode and a second backward pass."""
    function, x = cases()[name]
    leaf, grad = x.clone().requires_grad_(), draw(*x.shape, dtype=x.dtype, seed=7)
    out = function(leaf)
    slopes = [torch.autograd.grad(out, leaf, grad, retain_graph=True)[0] for _ in range(2)]
    slopes.append(torch.autograd.grad(checkpoint(function, leaf, use_reentrant=False), leaf, grad)[0])
    assert torch.equal(slopes[0], slopes[1]) and torch.equal(slopes[0], slopes[2])
    with torch.inference_mode():
        assert torch.equal(function(x), out)


@pytest.mark.parametrize("name", PARTS)
def test_other_users_of_what_goes_in_and_comes_out_are_not_disturbed(name: str) -> None:
    """exp saves its result, which is the op's input; the op's gradient reaches a residual, too; the op runs twice."""
    ours, x = cases(torch.float32)[name]

    def run() -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        a = leaf.exp()
        total = ours(a) + a + ours(a).tanh()
        return total, *torch.autograd.grad(total, leaf, draw(*x.shape, seed=7))

    found = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_layers, "DEVICE", "nowhere")  # the same call then goes to the reference
        wanted = run()
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4)


def test_offsets_beyond_32_bits() -> None:
    rows = 2**31 // 2048 + 3
    x = torch.zeros(rows, 2048, dtype=torch.bfloat16, device="cuda")
    x[-1] = draw(2048, dtype=torch.bfloat16)
    weight = draw(2048, dtype=torch.bfloat16, seed=1)
    wanted = {
        "rms_norm": reference.rms_norm(x[-1:], weight, EPSILON),
        "swiglu": reference.swiglu(x[-1:], x[-1:]),
    }
    assert relative(rms_norm(x, weight, EPSILON)[-1:], wanted["rms_norm"]) < PRECISION[torch.bfloat16]
    assert relative(swiglu(x, x)[-1:], wanted["swiglu"]) < PRECISION[torch.bfloat16]
    cos, sin = angles(1, rows, 128, torch.bfloat16)
    last = reference.rotary(x[None, -1:].unflatten(2, (16, 128)), cos[:, -1:], sin[:, -1:])
    assert torch.equal(rotary(x[None].unflatten(2, (16, 128)), cos, sin)[:, -1:], last)


# --- whole models ----------------------------------------------------------------------------------------------------


def hidden_and_gradients(
    name: str, with_ops: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], dict[str, Any]]:
    """Of a tiny model in float32: hidden states of text and features of images, and all gradients."""
    with monkeypatch.context() as patch:
        if not with_ops:
            for part in PARTS:
                patch.delitem(table._table[part], "cuda")
        model = build(name).cuda()
        modules.attach(model)
        lengths = [9, 11]
        ids = (torch.arange(20, device="cuda") * 7) % 59
        boundaries = [0, *accumulate(lengths)]
        hidden = text_model(model)(
            inputs_embeds=model.get_input_embeddings()(ids[None]),
            position_ids=positions(name, lengths).cuda(),
            attention_mask=None,
            use_cache=False,
            cu_seq_lens_q=boundaries,
            cu_seq_lens_k=boundaries,
        ).last_hidden_state
        pixels, grids = some_pixels(name, [[1, 4, 4], [1, 6, 10]])
        features = model.model.visual(pixels.cuda(), grid_thw=grids.cuda()).pooler_output
        for out in (hidden, features):
            (out * torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        return [hidden.detach(), features.detach()], gradients


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_model_computes_the_same_with_the_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for kernel in ("_RMSNorm", "_Rotary", "_SwiGLU"):
        original = getattr(triton_layers, kernel).apply
        counting = type(kernel, (), {"apply": staticmethod(lambda *a, k=kernel, f=original: seen.append(k) or f(*a))})
        monkeypatch.setattr(triton_layers, kernel, counting)
    wanted, expected = hidden_and_gradients(name, False, monkeypatch)
    assert not seen
    found, gradients = hidden_and_gradients(name, True, monkeypatch)
    text = {"_RMSNorm": 9 if name == "qwen3_vl" else 5, "_Rotary": 2 * 2, "_SwiGLU": 2}
    vision = {"_RMSNorm": 0, "_Rotary": 2 * 3, "_SwiGLU": 0}
    if name == "qwen2_5_vl":
        vision |= {"_RMSNorm": 7, "_SwiGLU": 3}
    assert {kernel: seen.count(kernel) for kernel in text} == {k: text[k] + vision[k] for k in text}
    for value, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, exact, atol=2e-5, rtol=2e-5)
    assert gradients.keys() == expected.keys() and gradients
    for key, value in gradients.items():
        size = float(expected[key].abs().max() + 1)
        torch.testing.assert_close(value, expected[key], atol=2e-5 * size, rtol=1e-4)
