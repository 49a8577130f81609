"""The plain policy gradient (Williams 1992, "Simple statistical gradient-following algorithms", Machine Learning 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_vlrl.algorithms.loss_tokens import LossTokens, bounded_exp, loss
from npu_vlrl.algorithms.metrics import Metrics, clip_metrics

if TYPE_CHECKING:
    from torch import Tensor


@loss()
def reinforce(tokens: LossTokens) -> tuple[Tensor, Metrics]:
    """-A · logprob. Nothing is clipped; the ratio, exp(logprob - anchor), is only reported."""
    ratio_N = bounded_exp(tokens.logprobs_N.detach() - tokens.anchor_N)
    return -tokens.advantages_N * tokens.logprobs_N, clip_metrics(ratio_N)
