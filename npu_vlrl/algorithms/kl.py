"""Estimates of KL(policy || reference) from tokens that the policy sampled, in the loss or in the reward.

Source: John Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npu_vlrl.algorithms.component import Options
from npu_vlrl.common.fields import NonNegative
from npu_vlrl.types import Sample

if TYPE_CHECKING:
    from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

EXPONENT_LIMIT = 20.0


class KL(Options):
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the model before training; 0 needs no reference."""
    kl_kind: KLKind = "k3"
    """Estimate of the KL divergence from one token, see docs/losses.md."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Adds the KL to the loss, or takes it from the reward of each token."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference_N"} if self.kl_coef else ())

    def added(self, loss_N: Tensor, logprobs_N: Tensor, reference_N: Tensor | None) -> Tensor:
        """The loss of each token with kl_coef · KL where that belongs in the loss, [N].

        Raises ValueError when the log-probabilities of the reference are missing.
        """
        if not self.kl_coef or self.kl_in != "loss":
            return loss_N
        if reference_N is None:
            raise ValueError(f"algorithm.kl_coef is {self.kl_coef}, which needs the logprobs of a reference policy")
        return loss_N + self.kl_coef * kl_per_token(logprobs_N, reference_N, self.kl_kind)

    def penalties(self, samples: Sequence[Sample]) -> np.ndarray:
        """-kl_coef · KL of each scored token of all samples where that belongs in the reward, else 0; float64 [N]."""
        import torch

        parts: list[Any] = [np.zeros(sample.n_scored) for sample in samples]
        if self.kl_coef and self.kl_in == "reward":
            for part, sample in zip(parts, samples, strict=True):
                assert sample.scores.reference_N is not None, "the samples were not scored"
                sampled = np.asarray(sample.sampled_mask, dtype=bool)
                behaviour = np.asarray(sample.behaviour_logprobs)[sampled]
                reference = torch.from_numpy(sample.scores.reference_N[sampled].astype(np.float64))
                kl = kl_per_token(torch.from_numpy(behaviour), reference, self.kl_kind)
                part[sampled] = -self.kl_coef * kl.numpy()
        return np.concatenate(parts) if parts else np.zeros(0)


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
        return (-difference_N).clamp(max=EXPONENT_LIMIT).expm1() + difference_N
    raise ValueError(f"algorithm.kl_kind: unknown KL estimate {kind!r}; choose one of k1, k2, k3")
