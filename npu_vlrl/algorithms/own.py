"""Components from the user's own files, named as `path/to/file.py:function`.

They run in this process. An exception, or a result that cannot be used, becomes a DataError that names the component.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from npu_vlrl.algorithms.advantages.batch import AdvantageBatch
from npu_vlrl.algorithms.advantages.estimator import Estimator
from npu_vlrl.algorithms.component import C, Chosen, component_of, make_options
from npu_vlrl.algorithms.group_rewards import Group, GroupReward
from npu_vlrl.algorithms.loss_tokens import Loss, LossTokens
from npu_vlrl.algorithms.metrics import RESERVED
from npu_vlrl.common.fields import ConfigError
from npu_vlrl.common.user_file import load_function
from npu_vlrl.types import MAX_REWARD, Credit, DataError


def load(kind: type[C], key: str, spec: str, given: Mapping[str, Any]) -> Chosen[C]:
    """The component that `spec` names, with the options `given` to it; `key` is that of the configuration.

    Raises ConfigError, naming file and function, for a file, function, signature or option that cannot be used.
    """
    try:
        component = component_of(load_function(spec), kind)
        parameters = 1 if component.options is None else 2
        try:
            inspect.signature(component.function).bind(*range(parameters))
        except TypeError as error:
            subject = {Estimator: "batch", Loss: "tokens", GroupReward: "group"}[kind]
            form = subject if parameters == 1 else f"{subject}, options"
            name = spec.rpartition(":")[2]
            raise ValueError(f"{spec} cannot be called with {form} ({error}); write `def {name}({form})`") from error
        options = make_options(component, given, f"{key}_options")
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    checks: dict[type[Any], Callable[[str, Callable[..., Any]], Callable[..., Any]]]
    checks = {Estimator: _checked_estimator, Loss: _checked_loss, GroupReward: _checked_group_reward}
    return Chosen(replace(component, function=checks[kind](spec, component.function)), options)


def try_loss(loss: Chosen[Loss], key: str) -> None:
    """Calls a loss with four tokens, and with none, before a model is loaded. Raises ConfigError for what it raises."""
    import torch

    for count in (4, 0):
        logprobs_N = torch.linspace(-2.0, -0.5, count).requires_grad_()
        other_N = logprobs_N.detach() - 0.1
        sample_N = torch.arange(count) // 2
        tokens = LossTokens(
            logprobs_N, other_N, torch.linspace(-1.0, 1.0, count), other_N, sample_N, count // 2, other_N
        )
        try:
            loss(tokens)
        except DataError as error:
            raise ConfigError(f"{key}: {error} (tried with {count} tokens)") from error


def _checked_loss(spec: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(tokens: LossTokens, *options: Any) -> Any:
        import torch

        made = _called(spec, function, tokens, *options)
        loss_N, metrics = _with_metrics(spec, made)
        count = len(tokens.logprobs_N)
        if not isinstance(loss_N, torch.Tensor) or loss_N.shape != (count,):
            found = f"shape {list(loss_N.shape)}" if isinstance(loss_N, torch.Tensor) else f"a {type(loss_N).__name__}"
            raise _wrong(spec, f"it returned {found} for {count} tokens", f"return a tensor of shape [{count}]")
        if tokens.logprobs_N.requires_grad and not loss_N.requires_grad:
            raise _wrong(spec, "its loss has no gradient", "compute it from tokens.logprobs_N")
        if not loss_N.isfinite().all() and tokens.logprobs_N.isfinite().all() and tokens.advantages_N.isfinite().all():
            raise _wrong(spec, "its loss is not finite for log-probabilities that are", "bound exponents and divisors")
        scalars = {}
        for name, value in metrics.items():
            if not name.endswith(("_sum", "_max")) or name.removesuffix("_sum") in RESERVED:
                remedy = "end it in _sum (the mean over tokens is recorded) or _max, and take no name of the learner's"
                raise _wrong(spec, f"its metric {name!r} cannot be recorded", remedy)
            scalars[name] = torch.as_tensor(value, dtype=loss_N.dtype, device=loss_N.device).detach()
            if scalars[name].shape != ():
                raise _wrong(spec, f"its metric {name!r} has the shape {list(scalars[name].shape)}", "give one number")
        return loss_N, scalars

    return checked


def _checked_estimator(spec: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(batch: AdvantageBatch, *options: Any) -> Any:
        made, given = _with_metrics(spec, _called(spec, function, batch, *options))
        metrics = _finite_metrics(spec, given)
        count = int(batch.scored_S.sum())
        arrays = vars(made) if isinstance(made, Credit) else {"advantages": made}
        numbers = {name: _numbers(spec, name, values, count, "scored tokens") for name, values in arrays.items()}
        if isinstance(made, Credit):
            return Credit(numbers["advantages_N"], numbers["returns_N"], numbers["critic_N"].astype(bool)), metrics
        return numbers["advantages"], metrics

    return checked


def _checked_group_reward(spec: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(group: Group, *options: Any) -> Any:
        made, metrics = _with_metrics(spec, _called(spec, function, group, *options))
        rewards = _numbers(spec, "rewards", made, len(group.trajectories), f"episodes of the group {group.name}")
        if (np.abs(rewards) > MAX_REWARD).any():
            raise _wrong(spec, f"it gave a reward beyond {MAX_REWARD:g}", "give smaller ones")
        return rewards.tolist(), _finite_metrics(spec, metrics)

    return checked


def _called(spec: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{spec} raised {type(error).__name__}: {error} ({line.filename}, line {line.lineno}); correct the function"
        ) from error


def _with_metrics(spec: str, made: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(made, tuple):
        return made, {}
    if len(made) != 2 or not isinstance(made[1], Mapping) or not all(isinstance(name, str) for name in made[1]):
        raise _wrong(spec, "it returned a tuple that is no pair of result and metrics", "return result, {name: number}")
    return made[0], dict(made[1])


def _numbers(spec: str, what: str, values: Any, count: int, of: str) -> np.ndarray:
    """float64 [count]"""
    remedy = f"return one for each of the {count} {of}"
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise _wrong(spec, f"its {what} are no numbers ({error})", remedy) from error
    if found.shape != (count,):
        raise _wrong(spec, f"its {what} have the shape {list(found.shape)}", remedy)
    if (bad := np.flatnonzero(~np.isfinite(found))).size:
        raise _wrong(spec, f"its {what} are not finite: number {bad[0]} is {found[bad[0]]}", "return finite numbers")
    return found


def _finite_metrics(spec: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise _wrong(spec, f"its metric {name!r} is no number", "give one number for each name") from error
        if not math.isfinite(found[name]) or name in RESERVED:
            raise _wrong(spec, f"its metric {name!r} cannot be recorded", "give finite numbers under names of its own")
    return found


def _wrong(spec: str, what: str, remedy: str) -> DataError:
    return DataError(f"{spec}: {what}; {remedy}")
