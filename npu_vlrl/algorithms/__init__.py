"""Algorithms as pure functions: advantage estimators, losses, and the other components of the section `algorithm`.

Nothing here imports torch before a function needs it, so that a configuration is read without it.
"""

from npu_vlrl.algorithms.advantages import ESTIMATORS, AdvantageBatch, estimator
from npu_vlrl.algorithms.component import Options
from npu_vlrl.algorithms.config import AlgorithmConfig
from npu_vlrl.algorithms.group_rewards import Group, GroupRewards, group_reward
from npu_vlrl.algorithms.losses import LOSSES, LossTokens, loss

__all__ = [
    "ESTIMATORS",
    "LOSSES",
    "AdvantageBatch",
    "AlgorithmConfig",
    "Group",
    "GroupRewards",
    "LossTokens",
    "Options",
    "estimator",
    "group_reward",
    "loss",
]
