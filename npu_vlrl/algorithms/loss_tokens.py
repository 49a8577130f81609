"""Shared parts of the policy losses: the tokens and their log-probabilities, and ratios that stay finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_vlrl.algorithms.component import Component, F, marked

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Limit of a log-ratio: exp(20) is finite in every dtype used; a token beyond it counts as clipped and has no gradient.
"""


@dataclass(frozen=True, eq=False)
class LossTokens:
    """The N trained tokens of a micro-batch, in float32 or wider. Only `logprobs_N` has a gradient. N may be 0."""

    logprobs_N: Tensor
    """Log-probabilities under the policy as it is now, in nats."""
    behaviour_N: Tensor
    """Log-probabilities under the policy that sampled, as the engine reported them."""
    advantages_N: Tensor
    proximal_N: Tensor | None = None
    """Log-probabilities under the policy before the first update on this batch, as the learner computed them."""
    sample_N: Tensor | None = None
    """int64: the sample of each token, in 0..n_samples-1; every sample is complete."""
    n_samples: int = 0
    reference_N: Tensor | None = None
    """Log-probabilities under the policy that KL is measured against."""

    @property
    def anchor_N(self) -> Tensor:
        """Denominator of the ratio: the learner's own log-probability where there is one."""
        return self.behaviour_N if self.proximal_N is None else self.proximal_N


@dataclass(frozen=True)
class Loss(Component):
    """The loss of each token: a function of `LossTokens` that returns a tensor [N], to be weighted and summed, or that
    tensor and `Metrics`.
    """

    ratio: bool = False
    """Compares the policy with the one that sampled, which corrects for one update between the two."""
    corrects: bool = False
    """Has an off-policy correction of its own, so that no other can be chosen beside it."""


def loss(
    options: type[Any] | None = None, *, needs: tuple[str, ...] = (), ratio: bool = False, corrects: bool = False
) -> Callable[[F], F]:
    """Declares a function `f(tokens)`, with options `f(tokens, options)`, as a loss, see `Loss`.

    Example: `@loss(MyOptions, ratio=True)`. Raises ValueError for an unknown name in `needs`.
    """
    return marked(lambda function: Loss(function, options, frozenset(needs), ratio, corrects))


def bounded_exp(log_N: Tensor) -> Tensor:
    """The exponential function, constant beyond ±`LOG_RATIO_LIMIT`."""
    return log_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def wide(values: Tensor, like: Tensor) -> Tensor:
    """`values` without gradient, in the dtype of `like`, but at least float32."""
    import torch

    return values.detach().to(torch.promote_types(like.dtype, torch.float32))
