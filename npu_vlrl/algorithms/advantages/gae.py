"""Generalised advantage estimation, Schulman et al. 2016 (arXiv 1506.02438)."""

from __future__ import annotations

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import TokenOptions, over_tokens
from npu_vlrl.algorithms.advantages.tokens import Tokens, backward_sums, next_in_run, whiten
from npu_vlrl.common.fields import Share
from npu_vlrl.types import Credit


class MaskedGaeOptions(TokenOptions):
    token_discount: Share = 1.0
    """γ from token to token."""
    gae_lambda: Share = 1.0
    """λ of generalised advantage estimation."""


class GaeOptions(MaskedGaeOptions):
    advantage_mask: bool = False
    """Estimates over the sampled tokens alone (VAGEN's M^adv), not over the observations between them."""


@over_tokens(GaeOptions)
def gae(tokens: Tokens, token_discount: float, gae_lambda: float) -> Credit:
    """δ_t = r_t + γ V_(t+1) - V_t and A_t = δ_t + γ λ A_(t+1) over the tokens of an episode; V is 0 after the last one.

    Over all response tokens, observations included, this is PPO's plain estimator. Over the sampled tokens alone it is
    VAGEN's masked GAE (arXiv 2510.16907): it steps from one sampled token to the next and never over an observation.
    Whitened over the tokens given. Returns are A + V.
    """
    run = tokens.episode_N
    delta = tokens.rewards_N + token_discount * next_in_run(tokens.values_N, run) - tokens.values_N
    raw = backward_sums(delta, run, token_discount * gae_lambda)
    return Credit(whiten(raw), raw + tokens.values_N, np.ones(len(raw), dtype=bool))


@over_tokens(MaskedGaeOptions)
def masked_gae(tokens: Tokens, token_discount: float, gae_lambda: float) -> Credit:
    """The estimator `gae` with another default of `advantage_mask`."""
    return gae(tokens, token_discount, gae_lambda)
