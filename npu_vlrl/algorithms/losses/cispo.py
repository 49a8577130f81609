"""The clipped importance weight of CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_vlrl.algorithms.loss_tokens import LossTokens, bounded_exp, loss
from npu_vlrl.algorithms.losses.ppo import ClipOptions
from npu_vlrl.algorithms.metrics import Metrics, clip_metrics
from npu_vlrl.common.fields import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


class CispoOptions(ClipOptions):
    clip_margin: NonNegative = 0.0
    """Added to both bounds of the importance weight."""


@loss(CispoOptions, ratio=True)
def cispo(tokens: LossTokens, options: CispoOptions) -> tuple[Tensor, Metrics]:
    """-clip(r, 1 - clip_low, 1 + clip_high) · A · logprob, r = exp(logprob - anchor) without gradient.

    No token loses its gradient; the metrics count those whose weight is clipped. The paper sets no lower bound, which
    is `clip_low: 1`. There is no dual clip.
    """
    low, high = 1 - options.clip_low - options.clip_margin, 1 + options.clip_high + options.clip_margin
    ratio_N = bounded_exp(tokens.logprobs_N.detach() - tokens.anchor_N)
    loss_N = -ratio_N.clamp(low, high) * tokens.advantages_N * tokens.logprobs_N
    return loss_N, clip_metrics(ratio_N, ratio_N < low, ratio_N > high)
