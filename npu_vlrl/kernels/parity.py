"""Compares every op as it runs on a device with the reference on the host, forward and backward, on small inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_vlrl.kernels.kv_cache import CacheRows
from npu_vlrl.kernels.table import Implementation, op, reference_of
from npu_vlrl.kernels.tree import Tree

TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""Largest errors, see `Parity`. Devices may multiply float32 with 11 bits of mantissa, and bfloat16 has 8; a wrong
implementation is off by far more."""


class Parity(NamedTuple):
    """Errors are the largest difference from the reference, divided by the largest value that it has.

    Example: Parity("rms_norm", 1e-7, 3e-7, 2e-3, True)
    """

    op: str
    forward: float
    backward: float
    tolerance: float
    ok: bool


class Case(NamedTuple):
    """Inputs drawn from a normal distribution, and a call of an op with them. Those that it detaches get no gradient.

    Example: Case("swiglu", ((3, 8), (3, 8)), lambda run, gate, up: run(gate, up))
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]


def check(device: torch.device) -> list[Parity]:
    """Parity of each op in float32, and in bfloat16 under the name "OP in bfloat16". Errors of an op are raised."""
    names = sorted({case.op for case in CASES})
    return [_compare(name, device, dtype) for dtype in TOLERANCES for name in names]


def _compare(name: str, device: torch.device, dtype: torch.dtype) -> Parity:
    forward = backward = 0.0
    for case in CASES:
        if case.op == name:
            found = differences(case, draw_inputs(case, dtype), device, dtype)
            forward, backward = max(forward, found[0]), max(backward, found[1])
    tolerance = TOLERANCES[dtype]
    label = name if dtype == torch.float32 else f"{name} in {str(dtype).removeprefix('torch.')}"
    return Parity(label, forward, backward, tolerance, max(forward, backward) <= tolerance)


def differences(
    case: Case, drawn: Sequence[Tensor], device: torch.device, reference_dtype: torch.dtype
) -> tuple[float, float]:
    """Errors of one case, forward and backward, see `Parity`, with the inputs of `draw_inputs`.

    The reference computes in a dtype of its own.
    """
    ours = _run(case, op(case.op), device, drawn, drawn[0].dtype)
    theirs = _run(case, reference_of(case.op), torch.device("cpu"), drawn, reference_dtype)
    return _error(ours[0], theirs[0]), _error(ours[1], theirs[1])


def _run(
    case: Case,
    run: Implementation,
    device: torch.device,
    drawn: Sequence[Tensor],
    compute_dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns (outputs, gradients of the inputs that have one). The outputs' gradient is rounded as the inputs are."""
    inputs = [x.to(device, compute_dtype, copy=True).requires_grad_() for x in drawn]
    found = case.call(run, *inputs)
    outputs = list(found) if isinstance(found, tuple) else [found]
    if outputs[0].requires_grad:
        weights = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(drawn[0].dtype).to(x) for x in outputs]
        torch.autograd.backward(outputs, weights)
    return [x.detach() for x in outputs], [x.grad for x in inputs if x.grad is not None]


def draw_inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Draws the inputs of a case, on the host, equal in each process."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in case.shapes]


def _error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest error of several tensors; infinite for NaN, which would compare as not larger than any number."""
    pairs = [(a.cpu().double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return max((error if error == error else float("inf") for error in errors), default=0.0)


# --- the cases -------------------------------------------------------------------------------------------------------


def _varlen(cu: list[int], causal: bool) -> Callable[..., Tensor]:
    return lambda run, q, k, v: run(q, k, v, cu, cu, causal, 0.25)


def _masked(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over rows of 5 and 7 keys, padded on the left; the 3 queries are their last tokens."""
    keys = torch.arange(7)
    own = torch.stack([keys >= 2, keys >= 0])[:, None, None]
    return run(q, k, v, (own & (keys <= torch.arange(4, 7)[:, None])).to(q.device), 0.25)


def _kept(run: Callable[..., Tensor], q: Tensor, keys: Tensor, values: Tensor, news: list[int]) -> Tensor:
    """Decode attention over rows of 2, 7 and 5 tokens, the last `news` of each new."""
    lengths, room = [2, 7, 5], keys.shape[1]
    rows = CacheRows.of(torch.tensor(lengths, dtype=torch.int32, device=q.device), news, room, max(lengths), lengths)
    return run(q.detach(), keys.detach(), values.detach(), rows, 0.25)


def _rotary(run: Callable[..., Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    half = x.shape[3] // 2
    angles = torch.arange(x.shape[1])[:, None] / 1e4 ** (torch.arange(half) / half)
    angles = torch.cat([angles, angles], -1)[None]
    return run(x, angles.cos().to(x.device, dtype), angles.sin().to(x.device, dtype))


def _gated_mlp(run: Callable[..., Tensor], x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return run(x, (gate, bias), (up, None), (down, None))


def _add_at(run: Callable[..., Tensor], x: Tensor, rows: Tensor) -> Tensor:
    return run(x, torch.tensor([[True, False, False, True], [False, True, False, False]], device=x.device), rows)


def _logprob_entropy(
    run: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    targets = torch.arange(len(hidden), device=hidden.device) * 3
    forbidden = torch.arange(len(weight), device=weight.device) == 4
    return run(hidden, weight / 4, targets, 0.7, forbidden, 4)  # logits of size 2, as implementations round them or not


def _add_product(run: Implementation, total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    total = total.detach().float().clone()
    run(total, left.detach(), right.detach())
    return total


_PACKED = ((4, 12, 16), (2, 12, 16), (2, 12, 16))
_KEPT = ((3, 7, 2, 16), (3, 7, 2, 16))
_KEPT_IN_BLOCKS = ((3, 128, 2, 16), (3, 128, 2, 16))
_TREE = Tree(starts=(0, 4, 6, 7, 9), ends=(9, 6, 9, 9, 12))
"""Tree in which tokens 0..3 continue with 4..5 and with 6, and 6 with 7..8; another sequence shares nothing."""

CASES = (
    Case("varlen_attention", _PACKED, _varlen([0, 3, 4, 12], True)),
    Case("varlen_attention", _PACKED, _varlen([0, 3, 4, 12], False)),
    Case("varlen_attention", _PACKED, _varlen([0, 6, 12], True)),
    Case("varlen_attention", _PACKED, _varlen([0, 6, 12], False)),
    Case("tree_attention", _PACKED, lambda run, q, k, v: run(q, k, v, _TREE, 0.25)),
    Case("masked_attention", ((2, 4, 3, 16), (2, 2, 7, 16), (2, 2, 7, 16)), _masked),
    Case("decode_attention", ((4, 3, 16), *_KEPT), lambda run, q, k, v: _kept(run, q, k, v, [1, 1, 1])),
    Case("decode_attention", ((4, 6, 16), *_KEPT), lambda run, q, k, v: _kept(run, q, k, v, [1, 3, 2])),
    Case("decode_attention", ((4, 6, 16), *_KEPT_IN_BLOCKS), lambda run, q, k, v: _kept(run, q, k, v, [1, 3, 2])),
    Case("rms_norm", ((5, 32), (32,)), lambda run, x, weight: run(x, weight, 1e-6)),
    Case("rotary", ((2, 5, 4, 16),), lambda run, x: _rotary(run, x, x.dtype)),
    Case("rotary", ((1, 5, 4, 80),), lambda run, x: _rotary(run, x, torch.float32)),
    Case("swiglu", ((5, 32), (5, 32)), lambda run, gate, up: run(gate, up)),
    Case("gated_mlp", ((5, 8), (13, 8), (13, 8), (8, 13), (13,)), _gated_mlp),
    Case(
        "patch_embed", ((6, 24), (16, 3, 2, 2, 2), (16,)), lambda run, patches, weight, bias: run(patches, weight, bias)
    ),
    Case("add_at", ((2, 4, 16), (3, 16)), _add_at),
    Case("logprob_entropy", ((9, 32), (40, 32)), _logprob_entropy),
    Case("add_product", ((8, 16), (5, 8), (5, 16)), _add_product),
)
