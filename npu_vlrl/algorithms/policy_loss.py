"""The loss of the policy: a loss of each token, KL to a reference and entropy bonus, under one vector of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_vlrl.algorithms.component import Chosen, Component
from npu_vlrl.algorithms.entropy import Entropy
from npu_vlrl.algorithms.kl import KL, kl_per_token
from npu_vlrl.algorithms.loss_tokens import Loss, LossTokens, wide
from npu_vlrl.algorithms.metrics import Metrics, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyTerms:
    """The parts of the loss that the configuration chose, with their options."""

    loss: Chosen[Loss]
    correction: Chosen[Component]
    """One of `CORRECTIONS`: gives the weights of the tokens' losses and metrics, or None for weights of 1."""
    kl: KL
    entropy: Entropy


def policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    terms: PolicyTerms,
    *,
    sample_N: Tensor | None = None,
    n_samples: int = 0,
    proximal_N: Tensor | None = None,
    reference_N: Tensor | None = None,
    sampled_N: Tensor | None = None,
    current_N: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Σ weight · (correction · loss + kl_coef · kl - entropy_coef · entropy) over the N tokens of a micro-batch.

    Log-probabilities and entropy are in nats. `weights_N` comes from `token_weights`. Ratios compare with `proximal_N`
    where it is given, else with `behaviour_N`. `sample_N` (int64) and `n_samples` are for losses over samples. A
    micro-batch without tokens gives 0, which still depends on `logprobs_N`. NaN goes through; the step of the optimiser
    checks for it.

    The metrics carry no gradient; `reduce_metrics` adds micro-batches or ranks up. `gap_*` is |logprob - behaviour|:
    before the first optimiser step on a batch it is the disagreement of learner and engine, later the policy's drift as
    well. Its mean is over the tokens in `sampled_N` and its maximum over those in `current_N` (bool, all where not
    given); `gap_tokens` and `gap_max_tokens` are their numbers, where these are given.

    Raises ValueError where log-probabilities are missing that a term needs.
    """
    import torch

    tokens = LossTokens(
        logprobs_N.to(torch.promote_types(logprobs_N.dtype, torch.float32)),
        wide(behaviour_N, like=logprobs_N),
        wide(advantages_N, like=logprobs_N),
        None if proximal_N is None else wide(proximal_N, like=logprobs_N),
        sample_N,
        n_samples,
        None if reference_N is None else wide(reference_N, like=logprobs_N),
    )
    made = terms.loss(tokens)
    loss_N, metrics = made if isinstance(made, tuple) else (made, {})
    if (corrected := terms.correction(tokens)) is not None:
        weight_N, correction_metrics = corrected
        loss_N = weight_N * loss_N
        metrics = metrics | correction_metrics
    metrics = metrics | {"pg_loss_sum": loss_N.sum(), "entropy_sum": entropy_N.sum()}
    with torch.no_grad():
        metrics |= _distances(tokens, reference_N, sampled_N, current_N)
    loss_N = terms.kl.added(loss_N, tokens.logprobs_N, reference_N)
    loss_N = terms.entropy.added(loss_N, entropy_N)
    return (weights_N * loss_N).sum(), {name: value.detach().to(loss_N.dtype) for name, value in metrics.items()}


def _distances(
    tokens: LossTokens, reference_N: Tensor | None, sampled_N: Tensor | None, current_N: Tensor | None
) -> Metrics:
    """Distances of the policy from the engine, from its anchor, and from the reference."""
    gap_N = (tokens.logprobs_N - tokens.behaviour_N).abs()
    counts = {"gap_tokens": sampled_N, "gap_max_tokens": current_N}
    metrics = {
        **{name: chosen_N.sum() for name, chosen_N in counts.items() if chosen_N is not None},
        "tokens_sum": gap_N.new_tensor(len(gap_N)),
        "gap_sum": (gap_N if sampled_N is None else gap_N[sampled_N]).sum(),
        "gap_max": largest(gap_N if current_N is None else gap_N[current_N]),
        # The tokens were sampled from the anchor, or nearly, so it stands first in this KL.
        "anchor_kl_sum": kl_per_token(tokens.anchor_N, tokens.logprobs_N).sum(),
    }
    if reference_N is not None:
        metrics["kl_sum"] = kl_per_token(tokens.logprobs_N, reference_N).sum()
    return metrics
