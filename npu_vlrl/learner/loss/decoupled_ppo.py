"""Decoupled PPO: the policy that sampled and the policy that the step stays near are two.

Objective: Hilton et al. 2021, "Batch size-invariance for policy optimization", arXiv 2110.00641; for language models
AReaL (Fu et al. 2025, arXiv 2505.24298), whose code leaves tokens above a cap of the weight out.
"""

from __future__ import annotations

from torch import Tensor

from npu_vlrl.learner.loss.correction import masked_weights
from npu_vlrl.learner.loss.metrics import Metrics
from npu_vlrl.learner.loss.ppo import ppo
from npu_vlrl.learner.loss.terms import Bounds, Tokens


def decoupled_ppo(tokens: Tokens, bounds: Bounds) -> tuple[Tensor, Metrics]:
    """w · ppo with the ratio current / proximal and w = proximal / behaviour, 0 where w > correction_high.

    Raises ValueError without `proximal_N`.
    """
    weight_N, weight_metrics = masked_weights(tokens, 0.0, bounds.correction_high)
    loss_N, metrics = ppo(tokens, bounds)
    return weight_N * loss_N, metrics | weight_metrics
