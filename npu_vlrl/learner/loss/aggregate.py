"""How tokens become one number: a weight for each token, so that the loss is a plain sum of weight · loss.

The weights hold *global* counts. Sums over micro-batches and ranks therefore add up to the loss of the whole batch,
however it was split, and nothing is averaged twice.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def token_weights(
    sample_N: Tensor,
    n_samples: int,
    trained_per_sample: Tensor,
    mode: Aggregation,
    global_tokens: int,
    global_samples: int,
    constant: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights [N] of the trained tokens of one micro-batch.

    `sample_N` (int64): the sample of each token, in 0..n_samples-1; `trained_per_sample` [n_samples]: trained tokens of
    each. `global_tokens` and `global_samples` count trained tokens, and samples, of all micro-batches of all ranks in
    the optimiser step.

    token-mean: 1 / global_tokens. seq-mean-token-mean: 1 / (the sample's tokens · global_samples). seq-mean-token-sum:
    1 / global_samples. constant: 1 / (constant · global_samples), where `constant` is a number of tokens that does not
    depend on the data, such as the budget of a sample (Dr. GRPO, arXiv 2503.20783).
    Raises ValueError for an unknown mode, and for `constant` without a positive constant.
    """
    if mode not in get_args(Aggregation):
        modes = ", ".join(get_args(Aggregation))
        raise ValueError(f"algorithm.aggregation: unknown mode {mode!r}; choose one of {modes}")
    assert global_tokens > 0 and global_samples > 0 and len(trained_per_sample) == n_samples
    if mode == "token-mean":
        return torch.full(sample_N.shape, 1 / global_tokens, dtype=dtype, device=sample_N.device)
    if mode == "seq-mean-token-sum":
        return torch.full(sample_N.shape, 1 / global_samples, dtype=dtype, device=sample_N.device)
    if mode == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"algorithm.aggregation: constant needs a positive constant (tokens), got {constant}")
        return torch.full(sample_N.shape, 1 / (constant * global_samples), dtype=dtype, device=sample_N.device)
    return 1 / (trained_per_sample.to(dtype)[sample_N] * global_samples)
