"""Decoupled PPO: the behaviour policy, which sampled, and the proximal policy, which bounds the step, are distinct.

Objective: Hilton et al. 2021, "Batch size-invariance for policy optimization", arXiv 2110.00641; for language models
AReaL (Fu et al. 2025, arXiv 2505.24298), whose code leaves tokens above a cap of the weight out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_vlrl.algorithms.correction import CapOptions, masked_weights
from npu_vlrl.algorithms.loss_tokens import LossTokens, loss
from npu_vlrl.algorithms.losses.ppo import SurrogateOptions, ppo
from npu_vlrl.algorithms.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor


class DecoupledOptions(SurrogateOptions, CapOptions):
    """Options of the surrogate, and the cap of the weight."""


@loss(DecoupledOptions, needs=("proximal_N",), ratio=True, corrects=True)
def decoupled_ppo(tokens: LossTokens, options: DecoupledOptions) -> tuple[Tensor, Metrics]:
    """w · ppo with the ratio current / proximal and w = proximal / behaviour, 0 where w > correction_high.

    Raises ValueError without `proximal_N`.
    """
    weight_N, weight_metrics = masked_weights(tokens, 0.0, options.correction_high)
    loss_N, metrics = ppo(tokens, options)
    return weight_N * loss_N, metrics | weight_metrics
