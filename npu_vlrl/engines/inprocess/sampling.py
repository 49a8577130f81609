"""Sampling of tokens: temperature, top-k, top-p, forbidden ids, one random stream for each request.

Nothing here waits for the device, so a decode step can be captured as a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from npu_vlrl.types import SamplingParams

BLOCK = 512
"""Number of ids whose probabilities are summed before the search for the drawn id."""


@dataclass(frozen=True)
class Filters:
    """Temperature and filters of each row's distribution. Greedy rows have temperature 1 and no filter."""

    temperature_B1: Tensor
    """float32"""
    top_k_B1: Tensor | None
    """int64, 0 for all; None where no row has a top-k."""
    top_p_B1: Tensor | None
    """float32; None where no row has a top-p below 1."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Filters:
        temperature = torch.tensor([[one.temperature or 1.0] for one in params], device=device)
        top_k = [[one.top_k if one.temperature > 0 else 0] for one in params]
        top_p = [[one.top_p if one.temperature > 0 else 1.0] for one in params]
        return cls(
            temperature,
            torch.tensor(top_k, device=device) if any(k > 0 for (k,) in top_k) else None,
            torch.tensor(top_p, device=device) if any(p < 1 for (p,) in top_p) else None,
        )


def processed_logprobs(logits_BV: Tensor, filters: Filters, forbidden_V: Tensor) -> Tensor:
    """Log-probabilities float32 [B, V] of the distribution that is sampled from; filtered tokens are at -inf.

    The order is the usual one: forbidden ids, temperature, top-k, top-p.
    """
    logits = logits_BV.float().masked_fill(forbidden_V, -torch.inf) / filters.temperature_B1
    if filters.top_k_B1 is not None:
        logits = _keep_top_k(logits, filters.top_k_B1)
    if filters.top_p_B1 is not None:
        logits = _keep_top_p(logits, filters.top_p_B1)
    return logits.log_softmax(dim=-1)


def _keep_top_k(logits_BV: Tensor, top_k_B1: Tensor) -> Tensor:
    size = logits_BV.shape[1]
    order = logits_BV.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(size, device=order.device).expand_as(order))
    return logits_BV.masked_fill((ranks >= top_k_B1) & (top_k_B1 > 0), -torch.inf)


def _keep_top_p(logits_BV: Tensor, top_p_B1: Tensor) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probability reaches top_p."""
    ordered = logits_BV.softmax(dim=1).sort(dim=1, descending=True, stable=True)
    before = ordered.values.cumsum(dim=1) - ordered.values
    drop = torch.zeros_like(before, dtype=torch.bool).scatter_(1, ordered.indices, before >= top_p_B1)
    return logits_BV.masked_fill(drop, -torch.inf)


def draw(logprobs_BV: Tensor, uniforms_B: Tensor, greedy_B: Tensor) -> Tensor:
    """Token ids int64 [B]: the most likely one for greedy rows, else by inverting the distribution function at a
    uniform number in [0, 1). A token of probability zero is never drawn.

    First the block of ids is found, then the id in it: a cumulative sum over all ids would take longer than the rest.
    """
    n_ids = logprobs_BV.shape[1]
    blocks_BNI = torch.unflatten(functional.pad(logprobs_BV.exp(), (0, -n_ids % BLOCK)), 1, (-1, BLOCK))
    upto_BN = blocks_BNI.sum(2).cumsum(1)
    points_B1 = _below(uniforms_B[:, None] * upto_BN[:, -1:], upto_BN[:, -1:])
    # where no value is finite the searches end behind the last one
    block_B1 = torch.searchsorted(upto_BN, points_B1, right=True).clamp(max=upto_BN.shape[1] - 1)
    inside_BI = blocks_BNI.gather(1, block_B1[..., None].expand(-1, 1, BLOCK))[:, 0].cumsum(1)
    before_B1 = functional.pad(upto_BN, (1, 0)).gather(1, block_B1)
    rest_B1 = _below(points_B1 - before_B1, inside_BI[:, -1:])
    sampled_B1 = block_B1 * BLOCK + torch.searchsorted(inside_BI, rest_B1, right=True)
    return torch.where(greedy_B, logprobs_BV.argmax(dim=1), sampled_B1[:, 0].clamp(max=n_ids - 1))


def _below(points: Tensor, total: Tensor) -> Tensor:
    """The points, limited to just below the total, since rounding may put them at it or beyond."""
    return torch.minimum(points, total * (1 - torch.finfo(total.dtype).eps))  # nextafter may run on the host


def uniforms(params: SamplingParams) -> Tensor:
    """The random numbers of one request, float32 [max_new_tokens], from its own seed: independent of the batch."""
    generator = torch.Generator().manual_seed(params.seed)
    return torch.rand(params.max_new_tokens, generator=generator)
