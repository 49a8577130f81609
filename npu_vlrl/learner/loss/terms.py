"""What the losses of the policy share: the tokens and their log-probabilities, bounds, and ratios that stay finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_vlrl.learner.loss.metrics import Metrics

LOG_RATIO_LIMIT = 20.0
"""exp(20) is finite in every dtype used; beyond it a token counts as fully clipped and passes no gradient."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The N trained tokens of a micro-batch, in float32 or wider. Only `logprobs_N` has a gradient."""

    logprobs_N: Tensor
    """Under the policy as it is now."""
    behaviour_N: Tensor
    """Under the policy that sampled, as the engine said."""
    advantages_N: Tensor
    proximal_N: Tensor | None = None
    """Under the policy as it was before the first update on this batch, as the learner said."""
    sample_N: Tensor | None = None
    """int64: the sample of each token, in 0..n_samples-1; every sample is whole."""
    n_samples: int = 0

    @property
    def anchor_N(self) -> Tensor:
        """What a ratio compares the policy with: the learner's own word where there is one."""
        return self.behaviour_N if self.proximal_N is None else self.proximal_N


@dataclass(frozen=True)
class Bounds:
    """Where losses cut off: ratios at 1 - clip_low and 1 + clip_high; see `policy_loss` for the others."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    correction_low: float = 0.5
    correction_high: float = 2.0


Loss = Callable[[Tokens, Bounds], tuple[Tensor, Metrics]]
"""Loss of each token [N], to be weighted and summed, and `clip_metrics` of it, maybe with more."""


def bounded_exp(log_N: Tensor) -> Tensor:
    """exp, constant beyond ±`LOG_RATIO_LIMIT`."""
    return log_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def wide(values: Tensor, like: Tensor) -> Tensor:
    """`values` without gradient, in the dtype of `like`, but at least float32."""
    return values.detach().to(torch.promote_types(like.dtype, torch.float32))
