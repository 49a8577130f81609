"""REINFORCE++, Hu et al. 2025 (arXiv 2501.03262): returns whitened over the batch. There is no critic."""

from __future__ import annotations

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import TokenOptions, over_samples, over_tokens
from npu_vlrl.algorithms.advantages.groups import centre
from npu_vlrl.algorithms.advantages.tokens import Tokens, backward_sums, whiten
from npu_vlrl.common.fields import Share
from npu_vlrl.types import Credit


class ReturnOptions(TokenOptions):
    token_discount: Share = 1.0
    """γ from token to token."""


@over_tokens(ReturnOptions, critic=False)
def reinforce_pp(tokens: Tokens, token_discount: float) -> Credit:
    """G_t = r_t + γ G_(t+1) over the tokens of an episode, whitened over those of the batch."""
    returns = backward_sums(tokens.rewards_N, tokens.episode_N, token_discount)
    return Credit(whiten(returns), returns, np.zeros(len(returns), dtype=bool))


@over_samples(lengths=True)
def reinforce_pp_baseline(rewards: np.ndarray, groups: list[str], lengths: np.ndarray) -> np.ndarray:
    """R - mean of the group, whitened over the trained tokens of the batch, float64 [S].

    `lengths` counts the trained tokens of each sample: a long sample weighs more in the whitening. Raises ValueError as
    `grpo` does.
    """
    centred_S = centre(rewards, groups).values_S
    tokens_N = whiten(np.repeat(centred_S, lengths))
    advantages_S: np.ndarray = tokens_N[np.cumsum(lengths) - 1]
    return advantages_S
