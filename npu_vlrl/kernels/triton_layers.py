"""The parts of layers by Triton kernels, for CUDA: each reads its inputs once and writes its result once.

`reference` defines the ops, and computes inputs that the kernels do not take, such as float64 and tensors on a CPU.
liger-kernel has these ops, too. It is not used: its rotary embedding and the gradient of its SwiGLU overwrite their
inputs, which others may still need, and its RMSNorm cannot be tested without a GPU.

Importing this module does not import Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from npu_vlrl.kernels import reference

DEVICE = "cuda"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TILE = 2048  # elements that a program of four warps holds of each tensor at a time
WIDEST = 16384  # a whole row is in registers
PROGRAMS = 512  # of the gradient of RMSNorm: four for each core of an H100, and each writes a row of the weight's


def _taken(*tensors: Tensor) -> bool:
    """Whether kernels take these: on their device, in their dtypes, and not empty."""
    return all(x.device.type == DEVICE and x.dtype in DTYPES and x.numel() for x in tensors)


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


# --- RMSNorm ---------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Implementation of `reference.rms_norm`, by the kernel where x and `weight` have one dtype; the gradient is
    rounded once.
    """
    if not _taken(x, weight) or x.dtype != weight.dtype or len(weight) > WIDEST:
        return reference.rms_norm(x, weight, epsilon)
    assert weight.shape == x.shape[-1:]
    out: Tensor = _RMSNorm.apply(x.contiguous(), weight.contiguous(), epsilon)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        from npu_vlrl.kernels import layer_triton_kernels

        out = torch.empty_like(x)
        n_rows, sizes = _rows(x)
        layer_triton_kernels.rms_norm_forward[(_blocks(n_rows, sizes["ROWS"]),)](
            x, weight, out, n_rows, epsilon, **sizes
        )
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from npu_vlrl.kernels import layer_triton_kernels

        x, weight = ctx.saved_tensors
        need_weight = ctx.needs_input_grad[1]
        n_rows, sizes = _rows(x)
        programs = min(PROGRAMS, _blocks(n_rows, sizes["ROWS"]))
        grad_x = torch.empty_like(x)
        parts = weight.new_empty(programs if need_weight else 1, len(weight), dtype=torch.float32)
        layer_triton_kernels.rms_norm_backward[(programs,)](
            grad.contiguous(), x, weight, grad_x, parts, n_rows, ctx.epsilon, WITH_WEIGHT=need_weight, **sizes
        )
        return grad_x, parts.sum(0).to(weight.dtype) if need_weight else None, None


def _rows(x: Tensor) -> tuple[int, dict[str, int]]:
    """Number of rows of x, and the sizes of a launch: several short rows, or one long row, for each program."""
    width = x.shape[-1]
    padded = 1 << (width - 1).bit_length()
    sizes = {"width": width, "ROWS": max(1, TILE // padded), "WIDTH": padded, "num_warps": max(4, padded // 1024)}
    return x.numel() // width, sizes


# --- rotary embedding ------------------------------------------------------------------------------------------------


def rotary(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Implementation of `reference.rotary`, with the same errors and bits; takes heads and tokens in any order, without
    a copy.

    The kernel computes it where cos and sin have one dtype and need no gradient.
    """
    reference.check_rotary(x_BTHD, cos_BTD, sin_BTD)
    angles = cos_BTD, sin_BTD
    if not _taken(x_BTHD, *angles) or cos_BTD.dtype != sin_BTD.dtype or any(x.requires_grad for x in angles):
        return reference.rotary(x_BTHD, cos_BTD, sin_BTD)
    out: Tensor = _Rotary.apply(x_BTHD, cos_BTD.contiguous(), sin_BTD.contiguous())  # type: ignore[no-untyped-call]
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTD, sin_BTD)
        return _rotate(x_BTHD, cos_BTD, sin_BTD, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None, None]:
        cos_BTD, sin_BTD = ctx.saved_tensors
        return _rotate(grad_BTHD, cos_BTD, sin_BTD, backward=True), None, None


def _rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, backward: bool) -> Tensor:
    from npu_vlrl.kernels import layer_triton_kernels

    if x_BTHD.stride(3) != 1:
        x_BTHD = x_BTHD.contiguous()
    _, length, heads, width = x_BTHD.shape
    half = width // 2
    padded = 1 << (half - 1).bit_length()
    pairs, n_pairs = max(1, TILE // 2 // padded), x_BTHD.numel() // width
    wide = torch.promote_types(x_BTHD.dtype, cos_BTD.dtype)
    out_BTHD = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    layer_triton_kernels.rotate[(_blocks(n_pairs, pairs),)](
        *(x_BTHD, cos_BTD, sin_BTD, out_BTHD),
        *x_BTHD.stride()[:3],
        *(length, n_pairs, cos_BTD.numel() // width),
        heads=heads,
        half=half,
        BACKWARD=backward,
        ROUNDED=wide == x_BTHD.dtype,
        PAIRS=pairs,
        HALF=padded,
        num_warps=4,
        enable_fp_fusion=False,  # a product that is added is rounded first, as in the reference
    )
    return out_BTHD


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Implementation of `reference.swiglu`, by the kernel where both have one dtype; the gradients are rounded once."""
    if not _taken(gate, up) or gate.dtype != up.dtype:
        return reference.swiglu(gate, up)
    assert gate.shape == up.shape
    out: Tensor = _SwiGLU.apply(gate.contiguous(), up.contiguous())  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from npu_vlrl.kernels import layer_triton_kernels

        out = torch.empty_like(gate)
        layer_triton_kernels.swiglu_forward[(_blocks(gate.numel(), TILE),)](gate, up, out, gate.numel(), BLOCK=TILE)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from npu_vlrl.kernels import layer_triton_kernels

        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        layer_triton_kernels.swiglu_backward[(_blocks(gate.numel(), TILE),)](
            grad.contiguous(), gate, up, grad_gate, grad_up, gate.numel(), BLOCK=TILE
        )
        return grad_gate, grad_up
