"""Estimators as components, and decorators for those over samples, turns or tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from npu_vlrl.algorithms.advantages.batch import AdvantageBatch
from npu_vlrl.algorithms.advantages.tokens import over
from npu_vlrl.algorithms.component import Component, F, Options, marked
from npu_vlrl.types import Credit


@dataclass(frozen=True)
class Estimator(Component):
    """Credit of a batch: a function of an `AdvantageBatch` that returns advantages of its scored tokens, float [N], or
    a `Credit`; or either of them with metrics, a mapping of names to numbers.
    """

    compares_states: bool = False
    """Needs an environment that names its states."""


def estimator(
    options: type[Any] | None = None, *, needs: tuple[str, ...] = (), compares_states: bool = False
) -> Callable[[F], F]:
    """Declares a function `f(batch)`, with options `f(batch, options)`, as an estimator, see `Estimator`.

    Example: `@estimator(MyOptions)`. Raises ValueError for an unknown name in `needs`.
    """
    return marked(lambda function: Estimator(function, options, frozenset(needs), compares_states))


def over_samples(options: type[Options] | None = None, lengths: bool = False) -> Callable[[F], F]:
    """Declares `f(rewards_S, groups, …)`, which returns one value for all tokens of a sample; `lengths`: it also takes
    the number of trained tokens of each. Options are passed by name.
    """

    def credit(function: Callable[..., np.ndarray], batch: AdvantageBatch, given: Options | None = None) -> np.ndarray:
        known = {"lengths": batch.trained_S} if lengths else {}
        return batch.on_samples(function(batch.rewards(), batch.groups, **known, **_named(given)))

    return marked(lambda function: Estimator(partial(credit, function), options))


def over_turns(options: type[Options] | None = None, states: bool = False) -> Callable[[F], F]:
    """Declares `f(turns, …)`, which returns one value for all tokens of a turn; `states`: it also takes the state
    before each turn. Options are passed by name.
    """

    def credit(function: Callable[..., np.ndarray], batch: AdvantageBatch, given: Options | None = None) -> np.ndarray:
        known = {"states": batch.states()} if states else {}
        return batch.on_turns(function(batch.turns(), **known, **_named(given)))

    return marked(lambda function: Estimator(partial(credit, function), options, compares_states=states))


class TokenOptions(Options):
    """Options of all estimators over tokens."""

    advantage_mask: bool = True
    """Estimates over the sampled tokens alone (VAGEN's M^adv), not over the observations between them."""
    turn_rewards: bool = True
    """Gives each turn its own reward; otherwise the episode's outcome is earned by its last token."""


def over_tokens(keys: type[TokenOptions], critic: bool = True) -> Callable[[F], F]:
    """Declares `f(tokens, …)`, which returns the credit of each token. Options are passed by name, except those of
    `TokenOptions`, which select the tokens and their rewards.
    """

    def credit(function: Callable[..., Credit], batch: AdvantageBatch, options: TokenOptions) -> Credit:
        tokens = batch.tokens(critic, options.turn_rewards)
        mask_N = tokens.sampled_N if options.advantage_mask else np.ones_like(tokens.sampled_N)
        own = {name: value for name, value in _named(options).items() if name not in TokenOptions.model_fields}
        return over(tokens, mask_N, partial(function, **own))

    needs = frozenset({"values_N"} if critic else ())
    return marked(lambda function: Estimator(partial(credit, function), keys, needs))


def _named(options: Options | None) -> dict[str, Any]:
    return {} if options is None else dict(options)
