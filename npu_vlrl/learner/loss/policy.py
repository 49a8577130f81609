"""The loss of the policy: one of `LOSSES`, KL to a reference and entropy bonus, under one vector of weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from npu_vlrl.learner.loss.cispo import cispo
from npu_vlrl.learner.loss.correction import Correction, correction_weights
from npu_vlrl.learner.loss.decoupled_ppo import decoupled_ppo
from npu_vlrl.learner.loss.gspo import gspo
from npu_vlrl.learner.loss.kl import KLKind, kl_per_token
from npu_vlrl.learner.loss.metrics import Metrics, largest
from npu_vlrl.learner.loss.ppo import ppo
from npu_vlrl.learner.loss.reinforce import reinforce
from npu_vlrl.learner.loss.terms import Bounds, Loss, Tokens, wide

LossKind = Literal["ppo", "decoupled_ppo", "gspo", "cispo", "reinforce"]

LOSSES: dict[LossKind, Loss] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    loss: LossKind = "ppo",
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    sample_N: Tensor | None = None,
    n_samples: int = 0,
    proximal_N: Tensor | None = None,
    correction: Correction = "off",
    correction_low: float = 0.5,
    correction_high: float = 2.0,
    reference_N: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    entropy_coef: float = 0.0,
    sampled_N: Tensor | None = None,
    current_N: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Σ weight · (correction · loss + kl_coef · kl - entropy_coef · entropy) over the N tokens of a micro-batch.

    Log-probabilities and entropy are in nats. `weights_N` comes from `token_weights`; the loss is one of `LOSSES`, the
    correction one of `correction_weights`. Ratios compare with `proximal_N` where it is given, else with `behaviour_N`.
    `sample_N` (int64) and `n_samples` are needed for gspo only. A micro-batch without tokens gives 0, still tied to
    `logprobs_N`. NaN goes through: whoever steps the optimiser looks at the loss.

    The metrics carry no gradient; `reduce_metrics` adds micro-batches or ranks up. `gap_*` is |logprob - behaviour|:
    before the first optimiser step on a batch it is the disagreement of learner and engine, later the policy's drift as
    well. Its mean is over the tokens in `sampled_N` and its maximum over those in `current_N` (bool, all where not
    given); `gap_tokens` and `gap_max_tokens` are their numbers, where these are given.

    Raises ValueError for an unknown loss or correction, for decoupled_ppo with a correction, for either without
    `proximal_N`, and for `kl_coef` without `reference_N`.
    """
    if loss not in LOSSES:
        raise ValueError(f"algorithm.loss: unknown loss {loss!r}; choose one of {', '.join(LOSSES)}")
    if kl_coef and reference_N is None:
        raise ValueError(f"algorithm.kl_coef is {kl_coef}, which needs the logprobs of a reference policy")
    if loss == "decoupled_ppo" and correction != "off":
        raise ValueError("algorithm.loss: decoupled_ppo has a correction of its own; set algorithm.correction: off")
    tokens = Tokens(
        logprobs_N.to(torch.promote_types(logprobs_N.dtype, torch.float32)),
        wide(behaviour_N, like=logprobs_N),
        wide(advantages_N, like=logprobs_N),
        None if proximal_N is None else wide(proximal_N, like=logprobs_N),
        sample_N,
        n_samples,
    )
    bounds = Bounds(clip_low, clip_high, dual_clip, correction_low, correction_high)
    loss_N, metrics = LOSSES[loss](tokens, bounds)
    if correction != "off":
        weight_N, correction_metrics = correction_weights(tokens, correction, bounds)
        loss_N = weight_N * loss_N
        metrics |= correction_metrics
    metrics |= {"pg_loss_sum": loss_N.sum(), "entropy_sum": entropy_N.sum()}
    metrics |= _distances(tokens, reference_N, sampled_N, current_N)
    if kl_coef and reference_N is not None:
        loss_N = loss_N + kl_coef * kl_per_token(tokens.logprobs_N, reference_N, kl_kind)
    if entropy_coef:
        loss_N = loss_N - entropy_coef * entropy_N
    return (weights_N * loss_N).sum(), {name: value.detach().to(loss_N.dtype) for name, value in metrics.items()}


@torch.no_grad()
def _distances(
    tokens: Tokens, reference_N: Tensor | None, sampled_N: Tensor | None, current_N: Tensor | None
) -> Metrics:
    """How far the policy is from the engine, from its anchor, and from the reference."""
    gap_N = (tokens.logprobs_N - tokens.behaviour_N).abs()
    counts = {"gap_tokens": sampled_N, "gap_max_tokens": current_N}
    metrics = {
        **{name: chosen_N.sum() for name, chosen_N in counts.items() if chosen_N is not None},
        "tokens_sum": torch.tensor(len(gap_N), device=gap_N.device),
        "gap_sum": (gap_N if sampled_N is None else gap_N[sampled_N]).sum(),
        "gap_max": largest(gap_N if current_N is None else gap_N[current_N]),
        # The tokens were sampled from the anchor, or nearly, so it stands first in this KL.
        "anchor_kl_sum": kl_per_token(tokens.anchor_N, tokens.logprobs_N).sum(),
    }
    if reference_N is not None:
        metrics["kl_sum"] = kl_per_token(tokens.logprobs_N, reference_N).sum()
    return metrics
