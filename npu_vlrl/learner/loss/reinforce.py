"""The plain policy gradient (Williams 1992, "Simple statistical gradient-following algorithms", Machine Learning 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_vlrl.learner.loss.metrics import Metrics, clip_metrics
from npu_vlrl.learner.loss.terms import Bounds, Tokens, bounded_exp


def reinforce(tokens: Tokens, bounds: Bounds) -> tuple[Tensor, Metrics]:
    """-A · logprob. Nothing is clipped; the ratio, exp(logprob - anchor), is only reported."""
    ratio_N = bounded_exp(tokens.logprobs_N.detach() - tokens.anchor_N)
    never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return -tokens.advantages_N * tokens.logprobs_N, clip_metrics(ratio_N, never_N, never_N, never_N)
