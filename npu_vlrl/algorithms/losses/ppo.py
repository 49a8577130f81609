"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347), per token.

It has clip-higher (DAPO, arXiv 2503.14476) and dual clip (Ye et al. 2020, arXiv 1912.09729).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from npu_vlrl.algorithms.component import Options
from npu_vlrl.algorithms.loss_tokens import LossTokens, bounded_exp, loss
from npu_vlrl.algorithms.metrics import Metrics, clip_metrics
from npu_vlrl.common.fields import Positive

if TYPE_CHECKING:
    from torch import Tensor


class ClipOptions(Options):
    clip_low: Positive = 0.2
    """The ratio of a token is clipped below 1 - `clip_low`."""
    clip_high: Positive = 0.2
    """The ratio of a token is clipped above 1 + `clip_high`."""


class SurrogateOptions(ClipOptions):
    # In none of the papers; it only acts on a negative advantage whose ratio has passed 3, and guards against those.
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """A token with advantage A < 0 loses at most -A times this."""


@loss(SurrogateOptions, ratio=True)
def ppo(tokens: LossTokens, options: SurrogateOptions) -> tuple[Tensor, Metrics]:
    """`surrogate` of r = exp(logprob - anchor)."""
    return surrogate(bounded_exp(tokens.logprobs_N - tokens.anchor_N), tokens.advantages_N, options)


def surrogate(ratio_N: Tensor, advantages_N: Tensor, options: SurrogateOptions) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at most -A · dual_clip (None: no such limit).

    The metrics count the tokens whose gradient is cut off by each bound.
    """
    low, high = 1 - options.clip_low, 1 + options.clip_high
    loss_N = (-advantages_N * ratio_N).maximum(-advantages_N * ratio_N.clamp(low, high))
    negative_N = advantages_N < 0
    too_far_N = negative_N & False
    if options.dual_clip is not None:
        loss_N = loss_N.minimum(-advantages_N * options.dual_clip).where(negative_N, loss_N)
        too_far_N = negative_N & (ratio_N > options.dual_clip)
    metrics = clip_metrics(ratio_N, negative_N & (ratio_N < low), (advantages_N > 0) & (ratio_N > high), too_far_N)
    return loss_N, metrics
