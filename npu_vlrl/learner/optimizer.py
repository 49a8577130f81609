"""AdamW, and a step that an unusable gradient skips."""

from __future__ import annotations

import torch
from torch import nn

from npu_vlrl.config import OptimConfig


def new_optimizer(parameters: dict[str, nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )


def step_or_skip(optimizer: torch.optim.AdamW, max_grad_norm: float, lr: float, skip: bool = False) -> float | None:
    """Steps with the clipped gradients, and forgets them; returns their norm before clipping.

    None, and no change of the weights, when `skip` is set or the norm is not finite.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    usable = not skip and bool(torch.isfinite(norm))
    if usable:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm) if usable else None
