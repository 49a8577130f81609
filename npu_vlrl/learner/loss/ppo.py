"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347), per token.

With clip-higher (DAPO, arXiv 2503.14476), dual clip (Ye et al. 2020, arXiv 1912.09729) and the ratio of whole samples
(GSPO, Zheng et al. 2025, arXiv 2507.18071). N counts trained tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Ratio = Literal["token", "sequence"]

LOG_RATIO_LIMIT = 20.0
"""exp(20) is finite in every dtype used; beyond it a token counts as fully clipped and passes no gradient."""


def ppo_loss_terms(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    ratio: Ratio = "token",
    sample_N: Tensor | None = None,
    n_samples: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token [N] (to be weighted and summed), and statistics without gradient.

    r = exp(logprob - behaviour), or for `ratio="sequence"` exp(mean over the sample's tokens of that difference), which
    needs `sample_N` (int64, in 0..n_samples-1). loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at
    most -A · dual_clip (None: no such limit). `behaviour_N` and `advantages_N` get no gradient.

    Statistics: `ratio_sum`, `ratio_max`, and the counts `clip_low_sum`, `clip_high_sum`, `dual_clip_sum` of tokens
    whose gradient is cut off by that bound.
    """
    log_ratio_N = _wide(logprobs_N) - _wide(behaviour_N.detach())
    advantages_N = advantages_N.detach().to(log_ratio_N.dtype)
    if ratio == "sequence":
        assert sample_N is not None, "the ratio of a sample needs to know which tokens are its own"
        log_ratio_N = _sample_mean(log_ratio_N, sample_N, n_samples)
    ratio_N = log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * clipped_N)
    negative_N = advantages_N < 0
    too_far_N = torch.zeros_like(negative_N)
    if dual_clip is not None:
        loss_N = torch.where(negative_N, torch.minimum(loss_N, -advantages_N * dual_clip), loss_N)
        too_far_N = negative_N & (ratio_N > dual_clip)

    seen_N = ratio_N.detach()
    stats = {
        "ratio_sum": seen_N.sum(),
        "ratio_max": largest(seen_N),
        "clip_low_sum": (negative_N & (seen_N < 1 - clip_low)).sum(),
        "clip_high_sum": ((advantages_N > 0) & (seen_N > 1 + clip_high)).sum(),
        "dual_clip_sum": too_far_N.sum(),
    }
    return loss_N, stats


def largest(values_N: Tensor) -> Tensor:
    """The maximum of values that are not negative; 0 when there are none, as on a rank with nothing left to do."""
    return values_N.max() if len(values_N) else values_N.new_zeros(())


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _sample_mean(values_N: Tensor, sample_N: Tensor, n_samples: int) -> Tensor:
    """Each token gets the mean over its sample, [N]."""
    sums = values_N.new_zeros(n_samples).index_add(0, sample_N, values_N)
    return (sums / torch.bincount(sample_N, minlength=n_samples).clamp(min=1))[sample_N]
