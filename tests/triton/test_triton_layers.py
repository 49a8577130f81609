"""The parts of layers by Triton's interpreter, against the formulas in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from npu_vlrl.kernels import layer_triton_kernels, reference, triton_layers
from npu_vlrl.kernels.triton_layers import rms_norm, rotary, swiglu

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter

# Relative errors of a whole result. The interpreter cuts bfloat16 off, up to three times, where a GPU rounds it.
PRECISION = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}
DTYPES = st.sampled_from(list(PRECISION))
EPSILON = 0.5  # large enough for a wrong one to be seen


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with patch.object(triton_layers, "DEVICE", "cpu"):
        yield


def rms_formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPSILON).sqrt() * weight


def rotary_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of a half and its partner, written out."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        out[..., i] = x[..., i] * cos[:, :, None, i] - x[..., i + half] * sin[:, :, None, i]
        out[..., i + half] = x[..., i + half] * cos[:, :, None, i + half] + x[..., i] * sin[:, :, None, i + half]
    return out


def swiglu_formula(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == wanted.shape
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < PRECISION[dtype], f"relative error {error}"


def check(function: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values and gradients; the inputs stay what they are."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    kept = [x.detach().clone() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, wanted = function(*inputs), formula(*wide)
    grad = draw(*found.shape, dtype=found.dtype, seed=7)
    sent = grad.clone()
    assert_near(found.detach(), wanted.detach(), inputs[0].dtype)
    gradients = torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, wide, grad.double())
    for value, expected in zip(*gradients, strict=True):
        assert_near(value, expected, inputs[0].dtype)
    assert all(map(torch.equal, (*inputs, grad), (*kept, sent)))


def check_rms(x: Tensor, weight: Tensor) -> None:
    check(lambda *inputs: rms_norm(*inputs, EPSILON), rms_formula, x, weight)


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check(lambda x: rotary(x, cos, sin), lambda x: rotary_formula(x, cos.double(), sin.double()), x)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(1, 5), max_size=3),
    width=st.integers(8, 70),  # of fewer numbers the gradient may be a difference of two that are nearly the same
    programs=st.sampled_from([1, 2, 512]),
    tile=st.sampled_from([32, 128, 2048]),
    dtype=DTYPES,
)
def test_rms_norm(rows: list[int], width: int, programs: int, tile: int, dtype: torch.dtype) -> None:
    with patch.multiple(triton_layers, PROGRAMS=programs, TILE=tile):
        check_rms(draw(*rows, width, dtype=dtype) / 2, draw(width, dtype=dtype, seed=1))


@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(*[st.integers(1, 4)] * 3),
    half=st.integers(1, 40),
    order=st.sampled_from(["bthd", "bhtd", "dbth"]),
    one_row=st.booleans(),
    tile=st.sampled_from([32, 2048]),
    dtype=DTYPES,
    wide_angles=st.booleans(),
)
def test_rotary(
    size: tuple[int, int, int],
    half: int,
    order: str,
    one_row: bool,
    tile: int,
    dtype: torch.dtype,
    wide_angles: bool,
) -> None:
    batch, length, heads = size
    if order == "bthd":
        x = draw(batch, length, heads, 2 * half, dtype=dtype)
    elif order == "bhtd":
        x = draw(batch, heads, length, 2 * half, dtype=dtype).transpose(1, 2)
    else:
        x = draw(2 * half, batch, length, heads, dtype=dtype).permute(1, 2, 3, 0)
    shape = (1 if one_row else batch, length, 2 * half)  # halves that are not repetitions, to see which one is used
    cos, sin = (draw(*shape, dtype=torch.float32 if wide_angles else dtype, seed=i) for i in (1, 2))
    with patch.object(triton_layers, "TILE", tile):
        check_rotary(x, cos, sin)
        if dtype != torch.bfloat16:
            assert torch.equal(rotary(x, cos, sin), reference.rotary(x, cos, sin))


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), tile=st.sampled_from([16, 64, 2048]), dtype=DTYPES)
def test_swiglu(shape: list[int], tile: int, dtype: torch.dtype) -> None:
    with patch.object(triton_layers, "TILE", tile):
        check(swiglu, swiglu_formula, draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_rows(width: int) -> None:
    x, weight = draw(7, width).requires_grad_(), draw(width, seed=1).requires_grad_()
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    found, wanted = rms_norm(x, weight, EPSILON), rms_formula(*wide)
    gradients = [torch.autograd.grad(out.sum(), leaves) for out, leaves in ((found, (x, weight)), (wanted, wide))]
    for value, expected in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(value.double(), expected, atol=2e-6, rtol=0)


def test_widths_of_real_models() -> None:
    check_rms(draw(3, 2048), draw(2048, seed=1))
    check_rms(draw(5, 16, 128), draw(128, seed=1))
    check_rms(draw(2, 5120), draw(5120, seed=1))
    check_rotary(draw(1, 3, 16, 128), draw(1, 3, 128, seed=1), draw(1, 3, 128, seed=2))
    check_rotary(draw(1, 3, 16, 80, dtype=torch.float16), draw(1, 3, 80, seed=1), draw(1, 3, 80, seed=2))
    check(swiglu, swiglu_formula, draw(3, 3420), draw(3, 3420, seed=1))


def test_heads_inside_a_larger_tensor_are_read_where_they_are() -> None:
    """As vision towers hand them over: queries, keys and values of a token side by side."""
    fused = draw(5, 3, 4, 16)
    q = fused[:, 0][None]
    assert not q.is_contiguous()
    cos, sin = draw(1, 5, 16, seed=1), draw(1, 5, 16, seed=2)
    asked: list[Tensor] = []
    with patch.object(Tensor, "contiguous", lambda x: asked.append(x) or x):
        found = rotary(q, cos, sin)
    assert asked and not any(x.shape == q.shape for x in asked)
    assert torch.equal(found, rotary(q.clone(), cos, sin))


def test_large_numbers_stay_finite() -> None:
    """silu(±100) is 100 and 0 to the last bit; rows of 1e15 have squares near the largest float32."""
    gate, up = torch.tensor([100.0, -100.0], requires_grad=True), torch.tensor([2.0, 3.0], requires_grad=True)
    out = swiglu(gate, up)
    assert out.tolist()[0] == 200 and abs(out.tolist()[1]) < 1e-35
    out.sum().backward()
    assert gate.grad is not None and up.grad is not None
    assert gate.grad[0] == 2 and abs(gate.grad[1]) < 1e-35 and up.grad[0] == 100 and abs(up.grad[1]) < 1e-35
    torch.testing.assert_close(rms_norm(torch.full((2, 8), 1e15), torch.ones(8), 1e-6), torch.ones(2, 8))
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rms_norm": (lambda x, y: rms_norm(x, y[0, 0, 0], EPSILON), lambda x, y: rms_formula(x, y[0, 0, 0])),
    "rotary": (lambda x, y: rotary(x, *ANGLES), lambda x, y: rotary_formula(x, *ANGLES)),
    "swiglu": (swiglu, swiglu_formula),
}
ANGLES = draw(1, 5, 8, seed=1), draw(1, 5, 8, seed=2)


@pytest.mark.parametrize("name", CASES)
def test_other_users_of_what_goes_in_and_comes_out_are_not_disturbed(name: str) -> None:
    """exp saves its result, which is the op's input; the op's gradient reaches a residual, too; each runs twice."""
    x, y = draw(2, 5, 3, 8), draw(2, 5, 3, 8, seed=3)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, y)]
        a, b = leaves[0].exp(), leaves[1].exp()
        if dtype == torch.float64 and name == "rotary":
            formula = lambda a, b: rotary_formula(a, *(angle.double() for angle in ANGLES))  # noqa: E731
        else:
            formula = function
        total = formula(a, b) + a * b + formula(a, b).tanh() + b
        weights = torch.linspace(-1, 1, total.numel(), dtype=dtype).view_as(total)
        first = torch.autograd.grad(total, leaves, weights, retain_graph=True)
        again = torch.autograd.grad(total, leaves, weights)
        assert all(map(torch.equal, first, again))
        return [total.detach(), *first]

    for found, wanted in zip(run(CASES[name][0], torch.float32), run(CASES[name][1], torch.float64), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_checkpointing_and_modes_without_gradient_give_the_same_bits(name: str) -> None:
    function = CASES[name][0]
    leaves = [draw(2, 5, 3, 8, seed=seed).requires_grad_() for seed in (0, 3)]
    plain = function(*leaves)
    kept = checkpoint(function, *leaves, use_reentrant=False)
    assert torch.equal(plain, kept)
    gradients = [torch.autograd.grad(out.sum(), leaves, allow_unused=True) for out in (plain, kept)]
    for a, b in zip(*gradients, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(function(*leaves), plain)
    with torch.inference_mode():
        assert torch.equal(function(*(x.detach() for x in leaves)), plain)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(name: str, frozen: int) -> None:
    function = CASES[name][0]
    leaves = [draw(2, 5, 3, 8, seed=seed).requires_grad_() for seed in (0, 3)]
    both = torch.autograd.grad(function(*leaves).sum(), leaves)
    leaves[frozen].requires_grad_(False)
    function(*leaves).sum().backward()
    assert leaves[frozen].grad is None and torch.equal(leaves[1 - frozen].grad, both[1 - frozen])


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_refused(name: str) -> None:
    x, y = draw(2, 5, 3, 8).requires_grad_(), draw(2, 5, 3, 8, seed=3)
    (first,) = torch.autograd.grad(CASES[name][0](x, y).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


BREAKAGES = {
    "padding of a row counts": ("x_ptr + offsets, mask=here, other=0.0", "x_ptr + offsets, mask=here, other=1.0"),
    "the mean is over the padding": ("tl.sum(x * x, 1) / width", "tl.sum(x * x, 1) / WIDTH"),
    "epsilon is forgotten": ("/ width + epsilon", "/ width"),
    "the row's own size has no gradient": ("(grad - unit * along[:, None])", "grad"),
    "the weight is not in the gradient": ("grad *= weight[None, :]", "grad *= 1.0"),
    "later tiles are not in the weight's gradient": ("total += tl.sum", "total = tl.sum"),
    "rows are taken twice": ("tl.num_programs(0) * ROWS):", "ROWS):"),
    "the gradient turns the same way": ("sin_first, sin_second = -sin_second, -sin_first", "pass"),
    "the gradient has the other half's sine": ("= -sin_second, -sin_first", "= -sin_first, -sin_second"),
    "the second half has the first cosine": ("product(second, cos_second", "product(second, cos_first"),
    "rows of a batch share angles": ("token % n_angles", "token % length"),
    "heads are not apart": ("start + head * head_stride", "start"),
    "the slope is that of the sigmoid": ("(1.0 + gate * (1.0 - open_share))", "(1.0 - open_share)"),
    "the gate is not opened": ("(grad * gate * open_share)", "(grad * gate)"),
}


def check_all() -> None:
    """Widths that need padding, more rows than a tile has, and programs with several tiles."""
    with patch.multiple(triton_layers, PROGRAMS=2, TILE=32):
        check_rms(draw(2, 9, 5), draw(5, seed=1))
        check_rotary(draw(3, 2, 3, 10), draw(3, 2, 10, seed=1), draw(3, 2, 10, seed=2))
        check(swiglu, swiglu_formula, draw(7, 11), draw(7, 11, seed=1))


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_kernel_is_noticed(name: str, tmp_path: Path) -> None:
    source = Path(layer_triton_kernels.__file__).read_text()
    right, wrong = BREAKAGES[name]
    assert right in source
    file = tmp_path / "broken.py"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("broken", file)
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    check_all()
    with (
        patch.dict(sys.modules, {layer_triton_kernels.__name__: broken}),
        patch("npu_vlrl.kernels.layer_triton_kernels", broken),
        pytest.raises(AssertionError),
    ):
        check_all()
