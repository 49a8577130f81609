"""The loss of the policy: clipped surrogate, KL to a reference and entropy bonus, under one vector of weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from npu_vlrl.learner.loss.kl import KLKind, kl_per_token
from npu_vlrl.learner.loss.ppo import Ratio, largest, ppo_loss_terms


def policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    sample_N: Tensor | None = None,
    n_samples: int = 0,
    reference_N: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ weight · (ppo + kl_coef · kl - entropy_coef · entropy) over the N trained tokens of a micro-batch.

    `weights_N` comes from `token_weights`; `sample_N` and `n_samples` are needed for `ratio="sequence"` only. A
    micro-batch without tokens gives 0, still tied to `logprobs_N`. NaN goes through: whoever steps the optimiser looks
    at the loss. Raises ValueError when `kl_coef` is set and `reference_N` is missing.

    The metrics carry no gradient. To add micro-batches or ranks up, add what ends in `_sum`, and take the maximum of
    what ends in `_max`; `tokens_sum` is the divisor (see `reduce_metrics`). `gap_*` is |logprob - behaviour|: before
    the first optimiser step on a batch it is the disagreement of learner and engine, later the policy's drift as well.
    """
    loss_N, metrics = ppo_loss_terms(
        logprobs_N, behaviour_N, advantages_N, clip_low, clip_high, dual_clip, ratio, sample_N, n_samples
    )
    metrics["pg_loss_sum"] = loss_N.detach().sum()
    if kl_coef:
        if reference_N is None:
            raise ValueError(f"algorithm.kl_coef is {kl_coef}, which needs the logprobs of a reference policy")
        loss_N = loss_N + kl_coef * kl_per_token(logprobs_N, reference_N, kl_kind)
    if entropy_coef:
        loss_N = loss_N - entropy_coef * entropy_N
    with torch.no_grad():
        gap_N = (logprobs_N - behaviour_N).abs()
        metrics |= {
            "tokens_sum": torch.tensor(len(logprobs_N), device=logprobs_N.device),
            "entropy_sum": entropy_N.sum(),
            "gap_sum": gap_N.sum(),
            "gap_max": largest(gap_N),
            # The tokens were sampled from the behaviour policy, so it stands first in this KL.
            "behaviour_kl_sum": kl_per_token(behaviour_N, logprobs_N).sum(),
        }
        if reference_N is not None:
            metrics["kl_sum"] = kl_per_token(logprobs_N, reference_N).sum()
    return (weights_N * loss_N).sum(), {name: value.detach().to(loss_N.dtype) for name, value in metrics.items()}


def reduce_metrics(parts: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """The metrics of all micro-batches as numbers: `x_sum` becomes the mean `x` over tokens, `x_max` stays.

    Means over no token at all are 0. `tokens` is the number of tokens.
    """
    collected: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.items():
            collected.setdefault(name, []).append(value)
    totals = {
        name: float(torch.stack(values).max() if name.endswith("_max") else torch.stack(values).sum())
        for name, values in collected.items()
    }
    tokens = totals.pop("tokens_sum", 0.0)
    reduced = {
        name.removesuffix("_sum"): total / max(tokens, 1) if name.endswith("_sum") else total
        for name, total in totals.items()
    }
    return {"tokens": tokens} | reduced
