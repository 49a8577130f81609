"""A training with estimator, loss and group reward from the user's own file, beside the same parts of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npu_vlrl.config import ConfigError
from npu_vlrl.train_loop import train
from tests.support.runs import metrics, small_config

torch.set_num_threads(1)

OWN = """
import numpy as np
from npu_vlrl.algorithms import Group, LossTokens, Options, estimator, group_reward, loss


@estimator()
def centred(batch):
    rewards_S, groups = batch.rewards(), np.array(batch.groups)
    values_S = np.array([r - rewards_S[groups == g].mean() for r, g in zip(rewards_S, groups)])
    return batch.on_samples(values_S), {"spread": float(np.ptp(values_S))}


class Scale(Options):
    scale: float = 7.0


@loss(Scale)
def plain(tokens: LossTokens, options: Scale):
    loss_N = -options.scale * tokens.advantages_N * tokens.logprobs_N
    return loss_N, {"positive_sum": (tokens.advantages_N > 0).sum()}


class Bonus(Options):
    bonus: float = 0.0


@group_reward(Bonus)
def first(group: Group, options: Bonus):
    return [options.bonus * (t.member == 0) for t in group.trajectories], {"members": len(group.trajectories)}
"""
COMMON = {"train__steps": 2, "warm_start__steps": 0, "algorithm__kl_coef": 0.0, "algorithm__dual_clip": None}


def test_own_parts_train_as_those_of_the_package_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    names = {"advantage": "centred", "loss": "plain", "group_reward": "first"}
    own = {f"algorithm__{key}": f"{file}:{name}" for key, name in names.items()}
    own |= {"algorithm__loss_options__scale": 1.0}
    built_in = {"algorithm__advantage": "dr_grpo", "algorithm__loss": "reinforce"}
    train(small_config(tmp_path / "package", **COMMON, **built_in))
    train(small_config(tmp_path / "own", **COMMON, **own))
    expected, found = ([m for m in metrics(tmp_path / name) if "pg_loss" in m] for name in ("package", "own"))
    assert len(found) == 2
    for theirs, ours in zip(expected, found, strict=True):
        assert {key: ours[key] for key in theirs.keys() & ours.keys()} == pytest.approx(
            {key: theirs[key] for key in theirs.keys() & ours.keys()}, rel=1e-6
        )
        assert theirs["grad_norm"] > 0
        assert ours["group_reward"] == 0 and ours["group_reward/members"] == 2
        assert 0 <= ours["positive"] <= 1 and ours["spread"] >= 0
    train(small_config(tmp_path / "bonus", **COMMON, **own, algorithm__group_reward_options__bonus=3.0))
    rewarded = [m for m in metrics(tmp_path / "bonus") if "pg_loss" in m]
    assert rewarded[0]["group_reward"] == 1.5 and rewarded[0]["pg_loss"] != pytest.approx(found[0]["pg_loss"])
    assert rewarded[0]["spread"] != pytest.approx(found[0]["spread"])

    file.write_text(OWN.replace("rewards_S[groups == g].mean()", "0.0"))
    resumed = small_config(tmp_path / "own", **COMMON, **own, run__if_exists="resume")
    with pytest.raises(ConfigError, match=r"^run\.if_changed: \S*mine\.py changed since the run in"):
        train(resumed)
