"""Implementations for CUDA devices. Imports without them: what cannot run here is not registered."""

from __future__ import annotations

from torch import Tensor

from npu_vlrl.kernels import reference, triton_logprob
from npu_vlrl.kernels.table import register


def logprob_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    forbidden_V: Tensor | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """By Triton, or by the reference where that is not suitable: float64, which Triton would round, and no rows."""
    chosen = triton_logprob if triton_logprob.suitable(hidden_TH) else reference
    return chosen.logprob_entropy(hidden_TH, weight_VH, targets_T, temperature, forbidden_V, chunk)


if triton_logprob.available("nvidia"):
    register("logprob_entropy", "cuda")(logprob_entropy)
