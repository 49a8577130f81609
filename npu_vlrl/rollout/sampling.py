"""Drawing tokens: temperature, top-k, top-p, forbidden ids, one random stream for each request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_vlrl.types import SamplingParams


def processed_logprobs(logits_BV: Tensor, params: Sequence[SamplingParams], forbidden_V: Tensor) -> Tensor:
    """Log-probabilities float32 [B, V] of the distribution that is sampled from; filtered tokens are at -inf.

    The order is that of the field: forbidden ids, temperature, top-k, top-p. Greedy rows (temperature 0) keep
    temperature 1 and no filter.
    """
    device = logits_BV.device
    temperatures = torch.tensor([[p.temperature or 1.0] for p in params], device=device)
    logits = logits_BV.float().masked_fill(forbidden_V, -torch.inf) / temperatures
    if any(p.temperature > 0 and p.top_k > 0 for p in params):
        logits = _keep_top_k(logits, [p.top_k if p.temperature > 0 else 0 for p in params])
    if any(p.temperature > 0 and p.top_p < 1 for p in params):
        logits = _keep_top_p(logits, [p.top_p if p.temperature > 0 else 1.0 for p in params])
    return logits.log_softmax(dim=-1)


def _keep_top_k(logits_BV: Tensor, top_k: Sequence[int]) -> Tensor:
    size = logits_BV.shape[1]
    order = logits_BV.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(size, device=order.device).expand_as(order))
    limits = torch.tensor([[k or size] for k in top_k], device=logits_BV.device)
    return logits_BV.masked_fill(ranks >= limits, -torch.inf)


def _keep_top_p(logits_BV: Tensor, top_p: Sequence[float]) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probability reaches top_p."""
    ordered = logits_BV.softmax(dim=1).sort(dim=1, descending=True, stable=True)
    before = ordered.values.cumsum(dim=1) - ordered.values
    limits = torch.tensor([[p] for p in top_p], device=logits_BV.device)
    drop = torch.zeros_like(before, dtype=torch.bool).scatter_(1, ordered.indices, before >= limits)
    return logits_BV.masked_fill(drop, -torch.inf)


def draw(logprobs_BV: Tensor, uniforms_B: Tensor, greedy_B: Tensor) -> Tensor:
    """Token ids int64 [B]: the most likely one for greedy rows, else by inverting the distribution function at a
    uniform number in [0, 1). A token of probability zero is never drawn.
    """
    cumulative = logprobs_BV.exp().cumsum(dim=1)
    total = cumulative[:, -1:]
    below_total = total * (1 - torch.finfo(total.dtype).eps)  # nextafter would run on the host on some accelerators
    points = torch.minimum(uniforms_B[:, None] * total, below_total)
    # where nothing is finite the search ends behind the last token
    sampled = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=logprobs_BV.shape[1] - 1)
    return torch.where(greedy_B, logprobs_BV.argmax(dim=1), sampled)


def uniforms(params: SamplingParams) -> Tensor:
    """The random numbers of one request, float32 [max_new_tokens], from its own seed: independent of the batch."""
    generator = torch.Generator().manual_seed(params.seed)
    return torch.rand(params.max_new_tokens, generator=generator)
