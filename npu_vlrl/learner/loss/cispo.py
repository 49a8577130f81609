"""The clipped importance weight of CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_vlrl.learner.loss.metrics import Metrics, clip_metrics
from npu_vlrl.learner.loss.terms import Bounds, Tokens, bounded_exp


def cispo(tokens: Tokens, bounds: Bounds) -> tuple[Tensor, Metrics]:
    """-clip(r, 1 - clip_low, 1 + clip_high) · A · logprob, r = exp(logprob - anchor) without gradient.

    No token loses its gradient; the metrics count those whose weight is clipped. The paper sets no lower bound, which
    is `clip_low: 1`. There is no dual clip.
    """
    low, high = 1 - bounds.clip_low, 1 + bounds.clip_high
    ratio_N = bounded_exp(tokens.logprobs_N.detach() - tokens.anchor_N)
    loss_N = -ratio_N.clamp(low, high) * tokens.advantages_N * tokens.logprobs_N
    never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return loss_N, clip_metrics(ratio_N, ratio_N < low, ratio_N > high, never_N)
