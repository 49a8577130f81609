"""The algorithm's settings after `preset` has filled the gaps, and what they make of a batch of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npu_vlrl.config import AlgorithmConfig, ConfigError
from npu_vlrl.learner.advantage import ESTIMATORS, Batch, estimate
from npu_vlrl.learner.presets import DEFAULTS, PRESETS
from npu_vlrl.types import Sample
from npu_vlrl.workflow.export import equal

if TYPE_CHECKING:
    from npu_vlrl.learner.loss import Aggregation, KLKind, LossKind


@dataclass(frozen=True)
class Algorithm:
    """What `AlgorithmConfig` means; see there. A setting that the estimator does not take is None."""

    advantage: str
    advantage_std: Literal["group", "batch"] | None
    advantage_mask: bool | None
    turn_rewards: bool | None
    token_discount: float | None
    turn_discount: float | None
    gae_lambda: float | None
    state_weight: float | None
    loss_mask: bool
    aggregation: Aggregation
    loss: LossKind
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl_kind: KLKind
    kl_in: Literal["loss", "reward"]
    dynamic_sampling: bool

    @property
    def needs_critic(self) -> bool:
        return ESTIMATORS[self.advantage].needs_critic

    @property
    def with_observations(self) -> bool:
        """Whether tokens that the policy did not sample are scored."""
        return not self.loss_mask or self.advantage_mask is False


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Fills what is None from the preset. Raises ConfigError for a combination that means nothing."""
    settings = DEFAULTS | PRESETS[config.preset]
    given = {name: value for name in settings if (value := getattr(config, name)) is not None}
    settings |= given
    if config.advantage == "gae" and config.advantage_mask is None:
        settings["advantage_mask"] = False
    means_something = ESTIMATORS[settings["advantage"]].settings
    for name in set().union(*(estimator.settings for estimator in ESTIMATORS.values())) - means_something:
        if name in given:
            raise ConfigError(f"algorithm.{name}: the estimator {settings['advantage']} has no such setting; remove it")
        settings[name] = None
    _check_used(config, settings)
    if settings["loss"] == "decoupled_ppo" and config.correction != "off":
        raise ConfigError("algorithm.correction: decoupled_ppo has a correction of its own; set it to off")
    if config.correction == "icepop" and config.correction_low >= config.correction_high:
        raise ConfigError("algorithm.correction_low: must be below algorithm.correction_high")
    return Algorithm(**settings)


def _check_used(config: AlgorithmConfig, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that was changed and that what is chosen beside it has no use for."""
    loss, clipped = settings["loss"], settings["loss"] != "reinforce"
    used = {
        "loss_constant": (settings["aggregation"] == "constant", "algorithm.aggregation=constant"),
        "max_extra_groups": (settings["dynamic_sampling"], "algorithm.dynamic_sampling=true"),
        "clip_low": (clipped, "another algorithm.loss"),
        "clip_high": (clipped, "another algorithm.loss"),
        "dual_clip": (clipped and loss != "cispo", "another algorithm.loss"),
        "correction_low": (config.correction == "icepop", "algorithm.correction=icepop"),
    }
    for name, (has_use, needed) in used.items():
        if not has_use and getattr(config, name) != AlgorithmConfig.model_fields[name].default:
            raise ConfigError(f"algorithm.{name}: has no effect here; leave it out, or set {needed}")


def assign_advantages(samples: Sequence[Sample], algorithm: Algorithm) -> list[Sample]:
    """The samples with their credit; those of an episode stand together. They were scored, where a critic or KL in the
    reward needs it. Raises ValueError when a reward is not finite, naming the sample.
    """
    batch = Batch(samples, _penalties(samples, algorithm))
    settings = {
        "advantage_std": algorithm.advantage_std,
        "advantage_mask": algorithm.advantage_mask,
        "turn_rewards": algorithm.turn_rewards,
        "token_discount": algorithm.token_discount,
        "turn_discount": algorithm.turn_discount,
        "gae_lambda": algorithm.gae_lambda,
        "state_weight": algorithm.state_weight,
    }
    credits = estimate(algorithm.advantage, batch, settings)
    return [replace(sample, credit=credit) for sample, credit in zip(samples, credits, strict=True)]


def _penalties(samples: Sequence[Sample], algorithm: Algorithm) -> np.ndarray:
    """-kl_coef · KL of each scored token, if it belongs in the reward; float64 [N]."""
    parts: list[Any] = [np.zeros(sample.n_scored) for sample in samples]
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        import torch  # `npu-vlrl config` resolves an algorithm without it

        from npu_vlrl.learner.loss import kl_per_token

        for part, sample in zip(parts, samples, strict=True):
            assert sample.scores.reference_N is not None, "the samples were not scored"
            sampled = np.asarray(sample.sampled_mask, dtype=bool)
            behaviour = np.asarray(sample.behaviour_logprobs)[sampled]
            reference = torch.from_numpy(sample.scores.reference_N[sampled].astype(np.float64))
            kl = kl_per_token(torch.from_numpy(behaviour), reference, algorithm.kl_kind)
            part[sampled] = -algorithm.kl_coef * kl.numpy()
    return np.concatenate(parts) if parts else np.zeros(0)


def most_varied(samples: Sequence[Sample], share: float) -> list[Sample]:
    """The samples of the `share` of groups whose outcomes vary most, at least one group (VAGEN's and RAGEN's filter).

    The order stays. Of groups with equal spread, but for rounding, the earlier ones are kept.
    """
    outcomes: dict[str, dict[str, float]] = {}
    for sample in samples:
        outcomes.setdefault(sample.group, {})[sample.episode] = sample.outcome
    spread = {group: _spread(list(values.values())) for group, values in outcomes.items()}
    ranked = sorted(spread, key=lambda group: -spread[group])
    kept = set(ranked[: max(1, math.ceil(share * len(ranked)))])
    return [sample for sample in samples if sample.group in kept]


def _spread(outcomes: Sequence[float]) -> float:
    """Standard deviation to 9 digits, 0 of outcomes that are `equal`."""
    return 0.0 if equal(min(outcomes), max(outcomes)) else float(f"{np.std(outcomes):.9g}")
