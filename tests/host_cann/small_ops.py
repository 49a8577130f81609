"""Reference kernels of the small fused operators, computed in float32; formulas as in CANN's documents."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.host_cann.attention import DTYPES, STATISTICS, require, statistics_of_packed

MAX_ROTARY_D = 896


def _floating(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        require(tensor.dtype in DTYPES, f"{name} must be float16, bfloat16 or float32, not {tensor.dtype}")


def _trailing(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """The dimensions of x that gamma covers, which must be its last ones."""
    _floating("x", x)
    require(gamma.dtype in (x.dtype, torch.float32), f"gamma is {gamma.dtype}, x is {x.dtype}")
    require(
        0 < gamma.dim() <= x.dim() and x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        f"gamma {list(gamma.shape)} must be the last dimensions of x {list(x.shape)}",
    )
    return tuple(range(x.dim() - gamma.dim(), x.dim()))


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """y = x * rstd * gamma, rstd = 1 / sqrt(mean(x^2) + epsilon)"""
    dims = _trailing(x, gamma)
    inverse = x.float().square().mean(dims, keepdim=True).add(epsilon).rsqrt()
    rstd.copy_(inverse)
    y.copy_(x.float() * inverse * gamma.float())


def rms_norm_grad(grad: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, grad_x: Tensor, grad_gamma: Tensor) -> None:
    dims = _trailing(x, gamma)
    require(grad.shape == x.shape, f"the gradient {list(grad.shape)} must have the shape of x {list(x.shape)}")
    normed, weighted = x.float() * rstd, grad.float() * gamma.float()
    grad_x.copy_(rstd * (weighted - normed * (weighted * normed).mean(dims, keepdim=True)))
    grad_gamma.copy_((grad.float() * normed).sum_to_size(gamma.shape))


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor, x: Tensor) -> None:
    require(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 must have one shape and one type")
    x.copy_(x1.float() + x2.float())
    rms_norm(x, gamma, epsilon, y, rstd)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    _floating("x", x)
    require(x.shape[dim] % 2 == 0, f"SwiGLU splits dimension {dim} of {list(x.shape)} in two halves; it is odd")
    left, right = x.float().chunk(2, dim)
    return left, right


def swiglu(x: Tensor, dim: int, y: Tensor) -> None:
    """silu(first half) * second half"""
    left, right = _halves(x, dim)
    y.copy_(torch.nn.functional.silu(left) * right)


def swiglu_grad(grad: Tensor, x: Tensor, dim: int, grad_x: Tensor) -> None:
    left, right = _halves(x, dim)
    sigmoid, g = left.sigmoid(), grad.float()
    grad_x.copy_(torch.cat([g * right * sigmoid * (1 + left * (1 - sigmoid)), g * left * sigmoid], dim))


def _check_rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    require(mode == 0, f"rotary mode {mode} has no reference; 0 (half) has")
    _floating("x", x)
    require(
        cos.dtype == sin.dtype == x.dtype, f"x, cos and sin are {x.dtype}, {cos.dtype}, {sin.dtype}; one type is needed"
    )
    require(cos.shape == sin.shape, f"cos {list(cos.shape)} and sin {list(sin.shape)} differ in shape")
    require(x.dim() in (3, 4), f"x must have 3 or 4 dimensions, not {x.dim()}")
    d = x.shape[-1]
    require(d % 2 == 0 and 0 < d <= MAX_ROTARY_D, f"D = {d} is not even and in 2..{MAX_ROTARY_D}")
    fits = cos.dim() == x.dim() and cos.shape[-1] == d
    fits = fits and all(n in (1, m) for n, m in zip(cos.shape, x.shape, strict=True))
    require(fits, f"cos {list(cos.shape)} must be 1 or equal to x {list(x.shape)} in each dimension, and equal in D")


def _rotate(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, y: Tensor) -> None:
    """y = x * cos + [-second half, first half] * sin"""
    _check_rotary(x, cos, sin, mode)
    y.copy_(x.float() * cos.float() + _rotate(x.float()) * sin.float())


def rotary_grad(
    grad: Tensor, cos: Tensor, sin: Tensor, x: Tensor, mode: int, grad_x: Tensor, grad_cos: Tensor, grad_sin: Tensor
) -> None:
    _check_rotary(grad, cos, sin, mode)
    g = grad.float()
    left, right = (g * sin.float()).chunk(2, -1)
    grad_x.copy_(g * cos.float() + torch.cat([right, -left], -1))
    if x is not None:  # else the gradients of cos and sin are not wanted
        grad_cos.copy_((g * x.float()).sum_to_size(cos.shape))
        grad_sin.copy_((g * _rotate(x.float())).sum_to_size(sin.shape))


def ring_attention_update(
    before_out: Tensor,
    before_maximum: Tensor,
    before_total: Tensor,
    now_out: Tensor,
    now_maximum: Tensor,
    now_total: Tensor,
    ends: Tensor | None,
    layout: str,
    statistics_layout: str,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
) -> None:
    """Merges the attentions over two parts of the keys.

    maximum = max of both,  total = sum of each total * exp(its maximum - maximum),
    out = sum of each out * its total * exp(its maximum - maximum) / total
    """
    require(layout in ("SBH", "TND"), f"input layout {layout!r} is not SBH or TND")
    require(statistics_layout in ("", "SBH", "TND"), f"softmax layout {statistics_layout!r} is unknown")
    require(before_out.shape == now_out.shape and before_out.dtype == now_out.dtype, "both outputs must be alike")
    for name, statistic in (("prev_softmax_max", before_maximum), ("cur_softmax_max", now_maximum)):
        require(statistic.shape[-1] == STATISTICS, f"{name} {list(statistic.shape)} does not end with 8")
    lengths: list[int] = []
    if layout == "TND":
        require(now_out.shape[-1] % 64 == 0, f"layout TND: D = {now_out.shape[-1]} is not a multiple of 64")
        require(ends is not None and not int(ends[0]), "layout TND needs actual_seq_qlen, which starts with 0")
        assert ends is not None
        lengths = ends.tolist()[1:]
    maximum.copy_(torch.maximum(before_maximum, now_maximum))
    shares = [before_total * (before_maximum - maximum).exp(), now_total * (now_maximum - maximum).exp()]
    total.copy_(shares[0] + shares[1])
    parts = []
    for one, share in ((before_out, shares[0]), (now_out, shares[1])):
        weight = _per_token(share / total, layout, statistics_layout == "TND", lengths)
        wide = one.unflatten(-1, (weight.shape[-2], -1)) if layout == "SBH" else one
        parts.append((wide.float() * weight).reshape(out.shape))
    out.copy_(parts[0] + parts[1])


def _per_token(statistic: Tensor, layout: str, same_as_input: bool, ends: list[int]) -> Tensor:
    """A statistic in the order of the outputs: [S, B, N, 1] or [T, N, 1]."""
    if layout == "SBH":
        return statistic[..., :1].permute(2, 0, 1, 3)
    sequences = statistics_of_packed(statistic, ends, same_as_input)
    return torch.cat([sequence.transpose(0, 1) for sequence in sequences])[..., :1]


def apply_adamw(
    parameter: Tensor,
    average: Tensor,
    square: Tensor,
    largest_square: Tensor | None,
    grad: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    epsilon: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """One step of AdamW (Loshchilov and Hutter, 2019), in place; `step` is the number of steps before this one."""
    require(parameter.shape == average.shape == square.shape == grad.shape, "parameter, moments and gradient differ")
    number = float(step) + 1
    g = -grad.float() if maximize else grad.float()
    average.copy_(average.float() * beta1 + g * (1 - beta1))
    square.copy_(square.float() * beta2 + g.square() * (1 - beta2))
    seen = square.float()
    if amsgrad:
        assert largest_square is not None  # torch_npu passes it with amsgrad
        largest_square.copy_(torch.maximum(largest_square.float(), seen))
        seen = largest_square.float()
    scale = (seen / (1 - beta2**number)).sqrt() + epsilon
    decayed = parameter.float() * (1 - lr * weight_decay)
    parameter.copy_(decayed - lr * (average.float() / (1 - beta1**number)) / scale)


def fill_scalar(x: Tensor, value: float) -> None:
    x.fill_(value)


def constant_pad(x: Tensor, padding: list[int], value: float, y: Tensor) -> None:
    y.copy_(torch.nn.functional.pad(x, padding, value=value))


KERNELS: dict[str, Callable[..., None]] = {
    "aclnnRmsNorm": rms_norm,
    "aclnnRmsNormGrad": rms_norm_grad,
    "aclnnAddRmsNorm": add_rms_norm,
    "aclnnSwiGlu": swiglu,
    "aclnnSwiGluGrad": swiglu_grad,
    "aclnnRotaryPositionEmbedding": rotary,
    "aclnnRotaryPositionEmbeddingGrad": rotary_grad,
    "aclnnRingAttentionUpdateV2": ring_attention_update,
    "aclnnApplyAdamWV2": apply_adamw,
    "aclnnInplaceFillScalar": fill_scalar,
    "aclnnConstantPadNd": constant_pad,
}
