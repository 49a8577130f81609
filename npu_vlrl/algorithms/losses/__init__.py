"""Losses of the policy by name; each is a file of its own."""

from npu_vlrl.algorithms.component import table
from npu_vlrl.algorithms.loss_tokens import Loss, LossTokens, loss
from npu_vlrl.algorithms.losses.cispo import cispo
from npu_vlrl.algorithms.losses.decoupled_ppo import decoupled_ppo
from npu_vlrl.algorithms.losses.gspo import gspo
from npu_vlrl.algorithms.losses.ppo import ppo
from npu_vlrl.algorithms.losses.reinforce import reinforce

__all__ = ["LOSSES", "Loss", "LossTokens", "loss"]

LOSSES: dict[str, Loss] = table(Loss, [ppo, decoupled_ppo, gspo, cispo, reinforce])
