"""AdamW in float32 for weights of any dtype, and a step that is skipped for gradients that are not finite.

A step of AdamW moves a weight by about the learning rate. At 1e-6 that is 5e-5 of a weight of 0.02, and bfloat16 has 8
bits: a step of less than 2^-9 of a weight is lost to rounding. So a weight of 16 bits has a master: a float32 copy that
the optimiser steps, and from which the weight is rounded after each step.

Bytes a trained parameter:

    weights of     weight   master   moments   gradient   together
    bfloat16            2        4         8          4         18
    float32             4        -         8          4         16

For a sharded policy (`shard.py`) the optimiser steps the rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from npu_vlrl.config import OptimConfig


def new_optimizer(parameters: dict[str, nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Makes an optimiser of `parameters`; those of 16 bits are stepped through masters, which begin as copies.

    A weight has one master, that of the newest optimiser. Gradients of several backward passes are accumulated in
    float32: in bfloat16 a sum of ones never exceeds 256.
    """
    narrow = [p for p in parameters.values() if p.dtype.itemsize < 4]
    for weight in narrow:
        _give_master(weight)
    optimizer = torch.optim.AdamW(
        [master(p) for p in parameters.values()],
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    if narrow:
        masters = [master(weight) for weight in narrow]
        optimizer.register_step_post_hook(lambda *_: _round(narrow, masters))
    return optimizer


def master(parameter: Tensor) -> Tensor:
    """Tensor that the optimiser steps: a float32 copy, the rows of this rank where the parameter is sharded, or the
    parameter itself where it has 32 bits.
    """
    return getattr(parameter, "master", parameter)


def sharded(tensor: Tensor) -> nn.Parameter | None:
    """The sharded parameter of which `tensor` is this rank's rows; None for a tensor that every rank has in full."""
    return getattr(tensor, "rows_of", None)


def set_shard(parameter: nn.Parameter, rows: Tensor) -> None:
    """Sets `rows`, this rank's shard of `parameter`, as the tensor that optimisers step."""
    parameter.master = rows  # type: ignore[attr-defined]
    rows.rows_of = parameter  # type: ignore[attr-defined]


def stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors that a step reads and writes, in the order of the parameters, which is the same on every rank.

    Their `.grad`, which `step_or_skip` clips, is float32 for weights of 16 bits, and None without a gradient.
    """
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def step_or_skip(
    optimizer: torch.optim.AdamW,
    max_grad_norm: float,
    lr: float,
    skip: bool = False,
    add: Callable[[Tensor], Tensor] = lambda values: values,
) -> float | None:
    """Steps with the clipped gradients, and clears them; returns their norm before clipping.

    With `skip`, or when the norm is not finite, weights and masters stay unchanged and the result is None. `add` sums a
    tensor of the host over the ranks of a sharded policy.
    """
    tensors = stepped(optimizer)
    if any(sharded(tensor) is not None for tensor in tensors):
        norm = _clip_sharded(tensors, max_grad_norm, add)
    else:
        norm = torch.nn.utils.clip_grad_norm_(tensors, max_grad_norm)
    usable = not skip and bool(torch.isfinite(norm))
    if usable:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm) if usable else None


def _clip_sharded(tensors: Sequence[Tensor], max_norm: float, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Clips the gradients of shards like `clip_grad_norm_`; returns the norm of the full gradients, the same bits on
    every rank.
    """

    def square(in_parts: bool) -> Tensor:
        chosen = [t.grad for t in tensors if t.grad is not None and (sharded(t) is not None) is in_parts]
        return torch.nn.utils.get_total_norm(chosen).cpu().double().square()

    norm = (square(in_parts=False) + add(square(in_parts=True))).sqrt()
    share = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, share)
    return norm


def _give_master(weight: nn.Parameter) -> None:
    if not hasattr(weight, "master"):
        # runs as soon as a weight's gradient is complete: gradients of 16 bits exist for one weight at a time
        weight.register_post_accumulate_grad_hook(_widen_gradient)  # type: ignore[no-untyped-call]
    weight.master = weight.detach().float().requires_grad_()  # type: ignore[attr-defined]


def _widen_gradient(weight: Tensor) -> None:
    """Moves the gradient of one backward pass to the master, in float32."""
    wide = master(weight)
    assert weight.grad is not None and wide is not weight
    if wide.grad is None:
        wide.grad = weight.grad.float()
    else:
        wide.grad.add_(weight.grad)
    weight.grad = None


@torch.no_grad()
def _round(weights: Iterable[nn.Parameter], masters: Iterable[Tensor]) -> None:
    """Rounds the masters that were stepped into their weights, in the memory where engines and graphs read them."""
    pairs = list(zip(weights, masters, strict=True))
    assert all(master(weight) is wide for weight, wide in pairs), "a newer optimiser has these weights"
    moved = [(weight, wide) for weight, wide in pairs if wide.grad is not None]
    if moved:
        torch._foreach_copy_([weight for weight, _ in moved], [wide for _, wide in moved])
        # writes to lists of tensors may not be counted, and only counted changes are sent to engines (sync/weights.py)
        torch.autograd.graph.increment_version([weight for weight, _ in moved])
