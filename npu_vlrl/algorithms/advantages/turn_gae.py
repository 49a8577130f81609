"""GAE over turns, and over the tokens inside each turn (VAGEN, arXiv 2510.16907)."""

from __future__ import annotations

import numpy as np

from npu_vlrl.algorithms.advantages.estimator import TokenOptions, over_tokens
from npu_vlrl.algorithms.advantages.tokens import Tokens, backward_sums, next_in_run, whiten
from npu_vlrl.algorithms.advantages.turns import TurnDiscount
from npu_vlrl.common.fields import Share
from npu_vlrl.types import Credit


class TurnGaeOptions(TokenOptions, TurnDiscount):
    gae_lambda: Share = 1.0
    """λ of generalised advantage estimation."""


class BiLevelGaeOptions(TurnGaeOptions):
    token_discount: Share = 1.0
    """γ from token to token."""


def turn_advantages(tokens: Tokens, rewards_K: np.ndarray, turn_discount: float, gae_lambda: float) -> np.ndarray:
    """δ_k = r_k + γ_turn V(e_(k+1)) - V(e_k) and A_k = δ_k + γ_turn λ A_(k+1), float64 [K]; not whitened.

    e_k is the last token of turn k.
    """
    ends_K = tokens.turn_ends()
    run, values = tokens.episode_N[ends_K], tokens.values_N[ends_K]
    delta = rewards_K + turn_discount * next_in_run(values, run) - values
    return backward_sums(delta, run, turn_discount * gae_lambda)


@over_tokens(BiLevelGaeOptions)
def bi_level_gae(tokens: Tokens, token_discount: float, turn_discount: float, gae_lambda: float) -> Credit:
    """The last token of a turn gets the turn's advantage; the tokens before it run GAE with γ_token inside their turn.

    Nothing flows from one turn into the tokens of the turn before it but through the turn's own advantage. Whitened
    over the tokens given. Returns are A + V.
    """
    turn, values = tokens.turn_ids(), tokens.values_N
    delta = tokens.rewards_N + token_discount * next_in_run(values, turn) - values
    ends_K = tokens.turn_ends()
    delta[ends_K] = turn_advantages(tokens, tokens.rewards_N[ends_K], turn_discount, gae_lambda)
    raw = backward_sums(delta, turn, token_discount * gae_lambda)
    return Credit(whiten(raw), raw + values, np.ones(len(raw), dtype=bool))


@over_tokens(TurnGaeOptions)
def turn_wise_gae(tokens: Tokens, turn_discount: float, gae_lambda: float) -> Credit:
    """A_k on every token of turn k, whitened with the statistics of the turn ends. r_k is the sum of the rewards of the
    turn's tokens: its reward, and KL where that is in the reward.

    Returns exist at the turn ends only, so that is where the critic is trained.
    """
    ends_K = tokens.turn_ends()
    rewards_K = np.bincount(tokens.turn_ids(), tokens.rewards_N, minlength=len(ends_K))
    raw_K = turn_advantages(tokens, rewards_K, turn_discount, gae_lambda)
    returns, critic = np.zeros(len(tokens.turn_N)), np.zeros(len(tokens.turn_N), dtype=bool)
    returns[ends_K] = raw_K + tokens.values_N[ends_K]
    critic[ends_K] = True
    return Credit(whiten(raw_K)[tokens.turn_ids()], returns, critic)
