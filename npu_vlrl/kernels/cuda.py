"""Implementations for CUDA devices. Imports without them: what cannot run here is not registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_vlrl.kernels import reference, triton_logprob
from npu_vlrl.kernels.table import register


def logprob_entropy(hidden_TH: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """By Triton, or by the reference: for float64, which Triton would round, for no rows, and for float32.

    One H200, 2048 rows, 151936 ids of width 2048, forward and backward: in bfloat16 8.1 ms, the reference 25.5; in
    float32, which Triton multiplies without tensor cores, 254 ms, the reference 116 (benchmarks/README.md).
    """
    worth_it = triton_logprob.suitable(hidden_TH) and hidden_TH.dtype != torch.float32
    chosen = triton_logprob if worth_it else reference
    return chosen.logprob_entropy(hidden_TH, *rest, **options)


if triton_logprob.available("nvidia"):
    register("logprob_entropy", "cuda")(logprob_entropy)
