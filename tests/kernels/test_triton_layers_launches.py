"""Which tensors go to the Triton parts of layers, and how they are launched. Needs no Triton: the kernels are recorded.

Tensors are on the meta device, where only shapes, strides and dtypes exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_vlrl.kernels import reference, triton_layers
from npu_vlrl.kernels.triton_layers import rms_norm, rotary, swiglu
from tests.kernels.test_triton_available import install, run_beside

KERNELS = ("rms_norm_forward", "rms_norm_backward", "rotate", "swiglu_forward", "swiglu_backward")


class Launch:
    """One launch: `programs`, its arguments and its named constants."""

    def __init__(
        self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        self.kernel, self.arguments, self.constants = kernel, arguments, constants
        (self.programs,) = grid


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    seen: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: str) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.append(Launch(self.kernel, grid, arguments, constants))

    source = ModuleType("source")
    for kernel in KERNELS:
        setattr(source, kernel, Recorder(kernel))
    monkeypatch.setattr("npu_vlrl.kernels.layer_triton_kernels", source, raising=False)
    monkeypatch.setitem(sys.modules, "npu_vlrl.kernels.layer_triton_kernels", source)
    monkeypatch.setattr(triton_layers, "DEVICE", "meta")
    return seen


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize(
    ("shape", "rows", "warps"), [((1, 8193, 2048), 1, 4), ((7, 16, 128), 16, 4), ((3, 5120), 1, 8), ((1, 33), 32, 4)]
)
def test_rms_norm_covers_all_rows(launches: list[Launch], shape: tuple[int, ...], rows: int, warps: int) -> None:
    x, weight = meta(*shape), meta(shape[-1])
    out = rms_norm(x, weight, 1e-6)
    gradients = torch.autograd.grad(out, (x, weight), torch.empty_like(out))
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype), (weight.shape, weight.dtype)]
    forward, backward = launches
    n_rows = prod(shape[:-1])
    assert forward.programs == -(-n_rows // rows) and backward.programs == min(512, forward.programs)
    for launch in launches:
        assert (launch.constants["width"], launch.constants["ROWS"]) == (shape[-1], rows)
        assert launch.constants["num_warps"] == warps and shape[-1] <= launch.constants["WIDTH"] < 2 * shape[-1]
        assert launch.arguments[-2:] == (n_rows, 1e-6)
    parts = backward.arguments[4]
    assert parts.shape == (backward.programs, shape[-1]) and parts.dtype == torch.float32
    assert (backward.kernel, backward.constants["WITH_WEIGHT"]) == ("rms_norm_backward", True)


def test_a_frozen_weight_costs_nothing(launches: list[Launch]) -> None:
    x, weight = meta(4000, 64), meta(64).requires_grad_(False)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None and weight.grad is None
    assert launches[1].constants["WITH_WEIGHT"] is False and launches[1].arguments[4].shape == (1, 64)


def test_rotary_gets_strides_and_not_copies(launches: list[Launch]) -> None:
    """Queries beside keys and values: a token is 3 · 4 · 80 numbers further, a head 80."""
    fused = meta(6, 3, 4, 80)
    x = fused[:, 0][None]
    cos, sin = (torch.empty(1, 6, 80, device="meta") for _ in range(2))
    out = rotary(x, cos, sin)
    assert out.is_contiguous() and out.shape == x.shape and out.dtype == x.dtype
    (launch,) = launches
    assert launch.arguments[0] is x or launch.arguments[0].stride() == x.stride()
    assert launch.arguments[4:] == (x.stride(0), 3 * 4 * 80, 80, 6, 24, 6)
    assert not launch.constants["ROUNDED"] and not launch.constants["BACKWARD"]
    assert (launch.constants["heads"], launch.constants["half"], launch.constants["HALF"]) == (4, 40, 64)
    assert launch.programs * launch.constants["PAIRS"] >= 24
    out.sum().backward()  # the gradient of a sum has no strides that could be used
    assert launches[1].constants["BACKWARD"] and launches[1].arguments[0].is_contiguous()
    assert fused.grad is not None and fused.grad.shape == fused.shape


@pytest.mark.parametrize(
    ("x", "angle", "rounded"),
    [("bfloat16", "bfloat16", True), ("bfloat16", "float32", False), ("float16", "bfloat16", False)],
)
def test_rotary_rounds_products_where_no_dtype_is_wider(
    launches: list[Launch], x: str, angle: str, rounded: bool
) -> None:
    cos, sin = (torch.empty(3, 5, 8, dtype=getattr(torch, angle), device="meta") for _ in range(2))
    rotary(meta(3, 5, 2, 8, dtype=getattr(torch, x)), cos, sin)
    assert launches[0].constants["ROUNDED"] is rounded and launches[0].arguments[-3:] == (5, 30, 15)


def test_swiglu_covers_all_numbers(launches: list[Launch]) -> None:
    gate, up = meta(3, 700), meta(3, 700)
    out = swiglu(gate, up)
    torch.autograd.grad(out, (gate, up), torch.empty_like(out))
    assert [launch.kernel for launch in launches] == ["swiglu_forward", "swiglu_backward"]
    for launch in launches:
        assert launch.arguments[-1] == 2100 and launch.programs == 2 and launch.constants == {"BLOCK": 2048}
    given = {id(gate), id(up)}
    assert not given & {id(launches[0].arguments[2]), *map(id, launches[1].arguments[3:5])}  # results are new tensors


def test_what_no_kernel_takes_goes_to_the_reference(launches: list[Launch]) -> None:
    wide, other = meta(3, 8, dtype=torch.float64), meta(3, 8, dtype=torch.float16)
    x, angles = meta(2, 3, 4, 8), torch.empty(1, 3, 8, device="meta")
    assert rms_norm(wide, wide[0], 1e-6).shape == (3, 8)
    assert rms_norm(other, meta(8), 1e-6).dtype == torch.float32  # as the reference promotes
    assert rms_norm(meta(0, 8), meta(8), 1e-6).shape == (0, 8)
    assert rms_norm(meta(2, 20000), meta(20000), 1e-6).shape == (2, 20000)
    assert swiglu(wide, wide).dtype == torch.float64 and swiglu(other, meta(3, 8)).dtype == torch.float32
    assert rotary(x, angles.double(), angles.double()).dtype == x.dtype
    assert rotary(x, angles, angles.bfloat16()).dtype == x.dtype
    asking = torch.empty(1, 3, 8, device="meta", requires_grad=True)
    rotary(x, asking, angles).sum().backward()
    assert asking.grad is not None and not launches


def test_tensors_on_a_cpu_go_to_the_reference() -> None:
    """The platform may be chosen while a model, or an image on its way, is still on the host."""
    x, y = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
    cos, sin = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    assert torch.equal(rms_norm(x, y[0, 0, 0], 1e-6), reference.rms_norm(x, y[0, 0, 0], 1e-6))
    assert torch.equal(rotary(x, cos, sin), reference.rotary(x, cos, sin))
    assert torch.equal(swiglu(x, y), reference.swiglu(x, y))


def test_angles_that_do_not_cover_are_refused(launches: list[Launch]) -> None:
    half = torch.empty(1, 3, 4, device="meta")
    with pytest.raises(ValueError, match=r"rotary: cos \[1, 3, 4\] and sin \[1, 3, 4\] must be \[B or 1, T, D\]"):
        rotary(meta(2, 3, 4, 8), half, half)
    assert not launches


@pytest.mark.parametrize(("backend", "active"), [("nvidia", "cuda"), ("ascend", "reference")])
def test_cuda_uses_them_only_where_triton_can_run(tmp_path: Any, backend: str, active: str) -> None:
    install(tmp_path, backend)
    code = (
        "import npu_vlrl.kernels as k; k.use('cuda'); "
        "print(*(k.active()[name] for name in ('rms_norm', 'rotary', 'swiglu')))"
    )
    assert run_beside(tmp_path, code).split() == [active] * 3
