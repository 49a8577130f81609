"""Importance weights for what engine and learner disagree about: w = proximal / behaviour, without gradient.

Both are the policy before the update; they differ by precision and kernels, and by updates that the engine has not got.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from npu_vlrl.learner.loss.metrics import Metrics
from npu_vlrl.learner.loss.terms import Bounds, Tokens, bounded_exp

Correction = Literal["off", "tis", "icepop"]


def correction_weights(tokens: Tokens, kind: Correction, bounds: Bounds) -> tuple[Tensor, Metrics]:
    """Weights [N] of the tokens' losses, and the metrics of `truncated_weights` or `masked_weights`.

    tis: `truncated_weights` at correction_high. icepop: `masked_weights` outside correction_low and correction_high.
    Raises ValueError without `proximal_N`, and for an unknown kind.
    """
    if kind == "tis":
        return truncated_weights(tokens, bounds.correction_high)
    if kind == "icepop":
        return masked_weights(tokens, bounds.correction_low, bounds.correction_high)
    raise ValueError(f"algorithm.correction: unknown kind {kind!r}; choose one of off, tis, icepop")


def truncated_weights(tokens: Tokens, high: float) -> tuple[Tensor, Metrics]:
    """min(w, high), as in truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; Ionides 2008). Metrics: mean weight, share of tokens at the cap.
    """
    ratio_N = _engine_ratio(tokens)
    weight_N = ratio_N.clamp(max=high)
    return weight_N, {"correction_weight_sum": weight_N.sum(), "correction_capped_sum": (ratio_N > high).sum()}


def masked_weights(tokens: Tokens, low: float, high: float) -> tuple[Tensor, Metrics]:
    """w inside [low, high], else 0, as in IcePop (Ling team 2025, "Every step evolves", arXiv 2510.18855).

    A token that is left out still counts where the loss is averaged. Metrics: mean weight, share of tokens left out.
    """
    ratio_N = _engine_ratio(tokens)
    outside_N = (ratio_N < low) | (ratio_N > high)
    weight_N = torch.where(outside_N, 0.0, ratio_N)  # NaN is not outside and stays
    return weight_N, {"correction_weight_sum": weight_N.sum(), "correction_masked_sum": outside_N.sum()}


def _engine_ratio(tokens: Tokens) -> Tensor:
    if tokens.proximal_N is None:
        raise ValueError(
            "algorithm.correction and the loss decoupled_ppo weigh tokens by learner over engine probability, which "
            "needs the learner's logprobs from before the first update on the batch: score the samples first, or set "
            "algorithm.correction: off and another algorithm.loss"
        )
    return bounded_exp(tokens.proximal_N - tokens.behaviour_N)
