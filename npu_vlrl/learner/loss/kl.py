"""Estimates of KL(policy || reference) from tokens that the policy sampled.

Source: John Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

EXPONENT_LIMIT = 20.0


def kl_per_token(logprobs_N: Tensor, reference_N: Tensor, kind: KLKind = "k3") -> Tensor:
    """[N], in nats; with d = logprob - reference: k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d.

    k1 and k3 have the right expectation; k2 and k3 are never negative. As a *loss*, k1 pushes nowhere on average (its
    expected gradient is zero on fresh samples), k2 gives the gradient of the KL. The exponent of k3 stops at 20.
    `reference_N` gets no gradient. Raises ValueError for an unknown kind.
    """
    difference_N = logprobs_N - reference_N.detach()
    if kind == "k1":
        return difference_N
    if kind == "k2":
        return difference_N.square() / 2
    if kind == "k3":
        return torch.expm1((-difference_N).clamp(max=EXPONENT_LIMIT)) + difference_N
    raise ValueError(f"algorithm.kl_kind: unknown KL estimate {kind!r}; choose one of k1, k2, k3")
