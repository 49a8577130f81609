"""The surrogate with the ratio of whole samples (GSPO, Zheng et al. 2025, arXiv 2507.18071, sections 4.1 and 4.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_vlrl.algorithms.loss_tokens import LossTokens, bounded_exp, loss
from npu_vlrl.algorithms.losses.ppo import SurrogateOptions, surrogate
from npu_vlrl.algorithms.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor


@loss(SurrogateOptions, ratio=True)
def gspo(tokens: LossTokens, options: SurrogateOptions) -> tuple[Tensor, Metrics]:
    """`surrogate` of s = exp(mean over the sample's tokens of logprob - anchor).

    The gradient is that of the paper's GSPO-token, A s ∇logprob for each token, so that tokens keep their own
    advantages. Where those of a sample are equal, it is the gradient of the value, plain GSPO.
    """
    assert tokens.sample_N is not None, "the ratio of a sample needs to know which tokens are its own"
    now_N = tokens.logprobs_N.detach()
    mean_N = _sample_mean(now_N - tokens.anchor_N, tokens.sample_N, tokens.n_samples)
    return surrogate(bounded_exp(mean_N + (tokens.logprobs_N - now_N)), tokens.advantages_N, options)


def _sample_mean(values_N: Tensor, sample_N: Tensor, n_samples: int) -> Tensor:
    """Each token gets the mean over its sample, [N]."""
    sums = values_N.new_zeros(n_samples).index_add(0, sample_N, values_N)
    return (sums / sample_N.bincount(minlength=n_samples).clamp(min=1))[sample_N]
