"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347), per token.

With clip-higher (DAPO, arXiv 2503.14476) and dual clip (Ye et al. 2020, arXiv 1912.09729).
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_vlrl.learner.loss.metrics import Metrics, clip_metrics
from npu_vlrl.learner.loss.terms import Bounds, Tokens, bounded_exp


def ppo(tokens: Tokens, bounds: Bounds) -> tuple[Tensor, Metrics]:
    """`surrogate` of r = exp(logprob - anchor)."""
    return surrogate(bounded_exp(tokens.logprobs_N - tokens.anchor_N), tokens.advantages_N, bounds)


def surrogate(ratio_N: Tensor, advantages_N: Tensor, bounds: Bounds) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at most -A · dual_clip (None: no such limit).

    The metrics count the tokens whose gradient is cut off by each bound.
    """
    low, high = 1 - bounds.clip_low, 1 + bounds.clip_high
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * ratio_N.clamp(low, high))
    negative_N = advantages_N < 0
    too_far_N = torch.zeros_like(negative_N)
    if bounds.dual_clip is not None:
        loss_N = torch.where(negative_N, torch.minimum(loss_N, -advantages_N * bounds.dual_clip), loss_N)
        too_far_N = negative_N & (ratio_N > bounds.dual_clip)
    metrics = clip_metrics(ratio_N, negative_N & (ratio_N < low), (advantages_N > 0) & (ratio_N > high), too_far_N)
    return loss_N, metrics
