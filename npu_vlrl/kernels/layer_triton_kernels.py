"""The Triton source of the parts of layers: RMSNorm, rotary embedding and SwiGLU, forward and backward.

Needs Triton when it is imported; `triton_layers` imports it when it is first called. Every product and sum is taken in
float32. No atomics, so that results repeat; no offset of a whole tensor in 32 bits; nothing is written into an input.
"""

import triton
import triton.language as tl


@triton.jit
def normalised(
    x_ptr: tl.tensor, row: tl.tensor, n_rows: tl.tensor, epsilon: tl.tensor, width: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Normalises the rows in `row`: x / sqrt(mean(x²) + epsilon) and 1 / that root, in float32; also returns offsets
    and mask of the tile."""
    columns = tl.arange(0, WIDTH)
    here = (row < n_rows)[:, None] & (columns < width)[None, :]
    offsets = tl.cast(row, tl.int64)[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=here, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + epsilon)
    return x * scale[:, None], scale, offsets, here


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_forward(
    x_ptr: tl.tensor,  # [T, H], as are the tensors below, unless noted
    weight_ptr: tl.tensor,  # [H]
    out_ptr: tl.tensor,
    n_rows: tl.tensor,
    epsilon: tl.tensor,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """RMSNorm; a program computes ROWS rows. The normalised rows are rounded to their dtype before the product with the
    weight."""
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit, _, offsets, here = normalised(x_ptr, row, n_rows, epsilon, width, WIDTH)
    unit = unit.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + offsets, (unit * weight[None, :]).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_backward(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,  # [H]
    grad_x_ptr: tl.tensor,
    grad_weight_ptr: tl.tensor,  # [programs, H] float32: of the rows of each program; written where WITH_WEIGHT
    n_rows: tl.tensor,
    epsilon: tl.tensor,
    width: tl.constexpr,
    WITH_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Gradients of RMSNorm; a program computes every n-th tile of ROWS rows, with n the number of programs.

    With u the normalised row, s the inverse root and h = gradient · weight, the gradient of x is
    s · (h - u · mean(h · u)).
    """
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        unit, scale, offsets, here = normalised(x_ptr, row, n_rows, epsilon, width, WIDTH)
        grad = tl.load(grad_ptr + offsets, mask=here, other=0.0).to(tl.float32)
        if WITH_WEIGHT:
            total += tl.sum(grad * unit.to(x_ptr.dtype.element_ty).to(tl.float32), 0)
        grad *= weight[None, :]
        along = tl.sum(grad * unit, 1) / width
        grad_x = scale[:, None] * (grad - unit * along[:, None])
        tl.store(grad_x_ptr + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=here)
    if WITH_WEIGHT:
        tl.store(grad_weight_ptr + tl.program_id(0) * width + columns, total, mask=columns < width)


@triton.jit
def product(a: tl.tensor, b: tl.tensor, like_ptr: tl.tensor, ROUNDED: tl.constexpr) -> tl.tensor:
    """Product a · b in float32; with ROUNDED it is first rounded to the dtype behind `like_ptr`."""
    found = a * b
    if ROUNDED:
        found = found.to(like_ptr.dtype.element_ty).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["n_pairs", "n_angles"])
def rotate(
    x_ptr: tl.tensor,  # [B, T, H, D], with the strides below and 1; in the backward pass the gradient
    cos_ptr: tl.tensor,  # [B or 1, T, D], as is the next
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [B, T, H, D]
    batch_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    length: tl.tensor,
    n_pairs: tl.tensor,
    n_angles: tl.tensor,
    heads: tl.constexpr,
    half: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Rotary embedding and its gradient; a program computes PAIRS pairs of a token and a head.

    Forward: (first · cos - second · sin, second · cos + first · sin), with cos and sin of the half that is written. In
    the gradient of each half, the sine is that of the other half, with the opposite sign.
    """
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, HALF)
    here = (pair < n_pairs)[:, None] & (column < half)[None, :]
    token, head = pair // heads, pair % heads
    start = tl.cast(token // length, tl.int64) * batch_stride + tl.cast(token % length, tl.int64) * token_stride
    x_ptr += (start + head * head_stride)[:, None] + column[None, :]
    first = tl.load(x_ptr, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + half, mask=here, other=0.0).to(tl.float32)

    angles = tl.cast(token % n_angles, tl.int64)[:, None] * (2 * half) + column[None, :]
    cos_first = tl.load(cos_ptr + angles, mask=here, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + angles + half, mask=here, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + angles, mask=here, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + angles + half, mask=here, other=0.0).to(tl.float32)
    if BACKWARD:
        sin_first, sin_second = -sin_second, -sin_first

    new_first = product(first, cos_first, x_ptr, ROUNDED) - product(second, sin_first, x_ptr, ROUNDED)
    new_second = product(second, cos_second, x_ptr, ROUNDED) + product(first, sin_second, x_ptr, ROUNDED)
    out_ptr += tl.cast(pair, tl.int64)[:, None] * (2 * half) + column[None, :]
    tl.store(out_ptr, new_first.to(out_ptr.dtype.element_ty), mask=here)
    tl.store(out_ptr + half, new_second.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def swiglu_forward(
    gate_ptr: tl.tensor,  # [n], as are all tensors below
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """SwiGLU; a program computes BLOCK elements. silu(gate) is rounded to its dtype before the product."""
    offsets = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = offsets < n
    gate = tl.load(gate_ptr + offsets, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=here, other=0.0).to(tl.float32)
    opened = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + offsets, (opened * up).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def swiglu_backward(
    grad_ptr: tl.tensor,  # [n], as are all tensors below
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    grad_gate_ptr: tl.tensor,
    grad_up_ptr: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Gradients of SwiGLU; a program computes BLOCK elements.

    With s = sigmoid(z), d silu(z)/dz = s · (1 + z · (1 - s)).
    """
    offsets = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = offsets < n
    grad = tl.load(grad_ptr + offsets, mask=here, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=here, other=0.0).to(tl.float32)
    open_share = tl.sigmoid(gate)
    slope = open_share * (1.0 + gate * (1.0 - open_share))
    tl.store(grad_gate_ptr + offsets, (grad * up * slope).to(grad_gate_ptr.dtype.element_ty), mask=here)
    tl.store(grad_up_ptr + offsets, (grad * gate * open_share).to(grad_up_ptr.dtype.element_ty), mask=here)
