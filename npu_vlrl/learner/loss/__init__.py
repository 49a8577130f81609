"""Losses on trained tokens: per-token terms, their weights, and their sum."""

from npu_vlrl.learner.loss.aggregate import Aggregation, token_weights
from npu_vlrl.learner.loss.correction import Correction
from npu_vlrl.learner.loss.kl import KLKind, kl_per_token
from npu_vlrl.learner.loss.metrics import reduce_metrics
from npu_vlrl.learner.loss.policy import LOSSES, LossKind, policy_loss
from npu_vlrl.learner.loss.value import reduce_value_metrics, value_loss

__all__ = [
    "LOSSES",
    "Aggregation",
    "Correction",
    "KLKind",
    "LossKind",
    "kl_per_token",
    "policy_loss",
    "reduce_metrics",
    "reduce_value_metrics",
    "token_weights",
    "value_loss",
]
