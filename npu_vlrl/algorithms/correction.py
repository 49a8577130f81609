"""Importance weights for the mismatch of engine and learner: w = proximal / behaviour, without gradient.

Both are the policy before the update. They differ by precision and kernels, and by updates that the engine lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import model_validator

from npu_vlrl.algorithms.component import FIXED, Component, Options
from npu_vlrl.algorithms.loss_tokens import LossTokens, bounded_exp
from npu_vlrl.common.fields import Positive

if TYPE_CHECKING:
    from torch import Tensor

    from npu_vlrl.algorithms.metrics import Metrics

OFF = "off"


class CapOptions(Options):
    correction_high: Annotated[Positive, FIXED] = 2.0
    """Upper bound of that weight; `decoupled_ppo` leaves tokens above it out."""


class BoundsOptions(CapOptions):
    correction_low: Annotated[Positive, FIXED] = 0.5
    """Lower bound of that weight, for `icepop`."""

    @model_validator(mode="after")
    def _ordered(self) -> BoundsOptions:
        if self.correction_low >= self.correction_high:
            raise ValueError("correction_low: must be below algorithm.correction_high")
        return self


def tis(tokens: LossTokens, options: CapOptions) -> tuple[Tensor, Metrics]:
    """min(w, correction_high), as in truncated importance sampling (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"; Ionides 2008). Metrics: mean weight, share of tokens at the cap.

    Raises ValueError without `proximal_N`.
    """
    ratio_N = _engine_ratio(tokens)
    weight_N = ratio_N.clamp(max=options.correction_high)
    capped = (ratio_N > options.correction_high).sum()
    return weight_N, {"correction_weight_sum": weight_N.sum(), "correction_capped_sum": capped}


def icepop(tokens: LossTokens, options: BoundsOptions) -> tuple[Tensor, Metrics]:
    """`masked_weights` outside correction_low and correction_high (Ling team 2025, "Every step evolves", arXiv
    2510.18855). Raises ValueError without `proximal_N`.
    """
    return masked_weights(tokens, options.correction_low, options.correction_high)


_NEEDS = frozenset({"proximal_N"})

CORRECTIONS: dict[str, Component] = {
    OFF: Component(lambda tokens: None),
    "tis": Component(tis, CapOptions, _NEEDS),
    "icepop": Component(icepop, BoundsOptions, _NEEDS),
}


def masked_weights(tokens: LossTokens, low: float, high: float) -> tuple[Tensor, Metrics]:
    """w inside [low, high], else 0. A token that is left out still counts where the loss is averaged.

    Metrics: mean weight, share of tokens left out.
    """
    ratio_N = _engine_ratio(tokens)
    outside_N = (ratio_N < low) | (ratio_N > high)
    weight_N = ratio_N.masked_fill(outside_N, 0.0)  # NaN is not outside and stays
    return weight_N, {"correction_weight_sum": weight_N.sum(), "correction_masked_sum": outside_N.sum()}


def _engine_ratio(tokens: LossTokens) -> Tensor:
    if tokens.proximal_N is None:
        raise ValueError(
            "algorithm.correction and the loss decoupled_ppo weigh tokens by learner over engine probability, which "
            "needs the learner's logprobs from before the first update on the batch: score the samples first, or set "
            "algorithm.correction: off and another algorithm.loss"
        )
    return bounded_exp(tokens.proximal_N - tokens.behaviour_N)
