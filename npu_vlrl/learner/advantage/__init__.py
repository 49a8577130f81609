"""Advantage estimators by name. Each is a pure function over arrays in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from npu_vlrl.learner.advantage.batch import Batch
from npu_vlrl.learner.advantage.dr_grpo import dr_grpo
from npu_vlrl.learner.advantage.gae import gae
from npu_vlrl.learner.advantage.gigpo import gigpo
from npu_vlrl.learner.advantage.grpo import grpo
from npu_vlrl.learner.advantage.opo import opo
from npu_vlrl.learner.advantage.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from npu_vlrl.learner.advantage.rloo import rloo
from npu_vlrl.learner.advantage.tokens import over
from npu_vlrl.learner.advantage.turn_gae import bi_level_gae, turn_wise_gae
from npu_vlrl.learner.advantage.turn_grpo import turn_grpo
from npu_vlrl.types import Credit

__all__ = ["ESTIMATORS", "Batch", "Estimator", "estimate"]


@dataclass(frozen=True)
class Estimator:
    """Makes the credit of a batch's scored tokens, given the settings of `algorithm` that it names."""

    function: Callable[..., Credit]
    """Called with the batch and its settings."""
    settings: frozenset[str] = frozenset()
    needs_critic: bool = False


def _over_samples(function: Callable[..., np.ndarray], *settings: str, lengths: bool = False) -> Estimator:
    """One value for all tokens of a sample."""

    def credit(batch: Batch, **options: Any) -> Credit:
        given = {"lengths": batch.trained_S} if lengths else {}
        values_S = function(batch.rewards(), batch.groups, **given, **options)
        return _without_critic(np.repeat(values_S, batch.scored_S))

    return Estimator(credit, frozenset(settings))


def _over_turns(function: Callable[..., np.ndarray], *settings: str, states: bool = False) -> Estimator:
    """One value for all tokens of a turn."""

    def credit(batch: Batch, **options: Any) -> Credit:
        given = {"states": batch.states()} if states else {}
        return _without_critic(batch.on_tokens(function(batch.turns(), **given, **options)))

    return Estimator(credit, frozenset(settings))


def _over_tokens(function: Callable[..., Credit], *settings: str, critic: bool = True) -> Estimator:
    def credit(batch: Batch, *, advantage_mask: bool, turn_rewards: bool, **options: Any) -> Credit:
        tokens = batch.tokens(critic, turn_rewards)
        mask_N = tokens.sampled_N if advantage_mask else np.ones_like(tokens.sampled_N)
        return over(tokens, mask_N, partial(function, **options))

    return Estimator(credit, frozenset({"advantage_mask", "turn_rewards", *settings}), critic)


def _without_critic(values_N: np.ndarray) -> Credit:
    return Credit(values_N, np.zeros_like(values_N), np.zeros(len(values_N), dtype=bool))


_GAE = ("token_discount", "gae_lambda")

ESTIMATORS: dict[str, Estimator] = {
    "grpo": _over_samples(grpo, "advantage_std"),
    "dr_grpo": _over_samples(dr_grpo),
    "rloo": _over_samples(rloo),
    "opo": _over_samples(opo, lengths=True),
    "reinforce_pp": _over_tokens(reinforce_pp, "token_discount", critic=False),
    "reinforce_pp_baseline": _over_samples(reinforce_pp_baseline, lengths=True),
    "gae": _over_tokens(gae, *_GAE),
    "masked_gae": _over_tokens(gae, *_GAE),  # they differ in the default of `advantage_mask`
    "bi_level_gae": _over_tokens(bi_level_gae, *_GAE, "turn_discount"),
    "turn_wise_gae": _over_tokens(turn_wise_gae, "turn_discount", "gae_lambda"),
    "gigpo": _over_turns(gigpo, "turn_discount", "state_weight", states=True),
    "turn_grpo": _over_turns(turn_grpo, "turn_discount"),
}


def estimate(name: str, batch: Batch, settings: Mapping[str, Any]) -> list[Credit]:
    """The credit of each sample's scored tokens. Of `settings` the estimator gets those that it has.

    Raises ValueError for rewards or values that are not finite, and for states that are missing.
    """
    estimator = ESTIMATORS[name]
    credit = estimator.function(batch, **{key: settings[key] for key in estimator.settings})
    ends = np.cumsum(batch.scored_S)[:-1]
    parts = (np.split(values, ends) for values in (credit.advantages_N, credit.returns_N, credit.critic_N))
    return [Credit(*own) for own in zip(*parts, strict=True)]
