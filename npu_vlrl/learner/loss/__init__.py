"""Losses on trained tokens: per-token terms, their weights, and their sum."""

from npu_vlrl.learner.loss.aggregate import Aggregation, token_weights
from npu_vlrl.learner.loss.kl import KLKind, kl_per_token
from npu_vlrl.learner.loss.policy import policy_loss, reduce_metrics
from npu_vlrl.learner.loss.ppo import Ratio, ppo_loss_terms

__all__ = [
    "Aggregation",
    "KLKind",
    "Ratio",
    "kl_per_token",
    "policy_loss",
    "ppo_loss_terms",
    "reduce_metrics",
    "token_weights",
]
