"""Advantage estimators by name; each is a pure function over arrays in a file of its own."""

from npu_vlrl.algorithms.advantages.batch import AdvantageBatch
from npu_vlrl.algorithms.advantages.best_of import best_of
from npu_vlrl.algorithms.advantages.dr_grpo import dr_grpo
from npu_vlrl.algorithms.advantages.estimator import Estimator, estimator
from npu_vlrl.algorithms.advantages.gae import gae, masked_gae
from npu_vlrl.algorithms.advantages.gigpo import gigpo
from npu_vlrl.algorithms.advantages.grpo import grpo
from npu_vlrl.algorithms.advantages.opo import opo
from npu_vlrl.algorithms.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from npu_vlrl.algorithms.advantages.rloo import rloo
from npu_vlrl.algorithms.advantages.turn_gae import bi_level_gae, turn_wise_gae
from npu_vlrl.algorithms.advantages.turn_grpo import turn_grpo
from npu_vlrl.algorithms.component import table

__all__ = ["ESTIMATORS", "AdvantageBatch", "Estimator", "estimator"]

ESTIMATORS: dict[str, Estimator] = table(
    Estimator,
    [
        *(grpo, dr_grpo, rloo, opo, reinforce_pp, reinforce_pp_baseline, gae, masked_gae, bi_level_gae, turn_wise_gae),
        *(gigpo, turn_grpo, best_of),
    ],
)
