"""The algorithm's settings after `preset` has filled the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from npu_vlrl.config import AlgorithmConfig, ConfigError
from npu_vlrl.learner.advantage import PRESETS, estimate_advantages
from npu_vlrl.learner.loss import Aggregation
from npu_vlrl.types import Sample


@dataclass(frozen=True)
class Algorithm:
    """What `AlgorithmConfig` means; see there."""

    advantage: str
    advantage_std: str | None
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    dynamic_sampling: bool


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Fills what is None from the preset. Raises ConfigError for a combination that means nothing."""
    settings = dict(PRESETS[config.preset])
    given = {name: getattr(config, name) for name in settings}
    settings |= {name: value for name, value in given.items() if value is not None}
    if settings["advantage"] != "grpo":
        if config.advantage_std is not None:
            raise ConfigError(f"algorithm.advantage_std: {settings['advantage']} has no standard deviation; remove it")
        settings["advantage_std"] = None
    elif settings["advantage_std"] is None:
        settings["advantage_std"] = "group"
    return Algorithm(**settings)


def assign_advantages(samples: Sequence[Sample], algorithm: Algorithm) -> list[Sample]:
    """The samples with their advantages. Raises ValueError when a reward is not finite, naming the sample."""
    for sample in samples:
        if not np.isfinite(sample.reward):
            raise ValueError(f"sample {sample.id} has the reward {sample.reward}")
    rewards = np.array([sample.reward for sample in samples], dtype=np.float64)
    groups = [sample.group for sample in samples]
    values = estimate_advantages(algorithm.advantage, rewards, groups, algorithm.advantage_std)
    return [replace(sample, advantage=float(value)) for sample, value in zip(samples, values, strict=True)]
