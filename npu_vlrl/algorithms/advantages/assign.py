"""Advantage estimation: samples in, samples with credit out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from npu_vlrl.algorithms.advantages.batch import AdvantageBatch
from npu_vlrl.algorithms.advantages.estimator import Estimator
from npu_vlrl.algorithms.component import Chosen
from npu_vlrl.algorithms.kl import KL
from npu_vlrl.types import Credit, Sample


def assign_advantages(
    samples: Sequence[Sample], estimator: Chosen[Estimator], kl: KL
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with their credit, and metrics of the estimator. The samples of an episode must be adjacent, and
    scored where a critic or KL in the reward needs it.

    Raises ValueError when a reward or a value is not finite, naming the sample, and for states that are missing.
    """
    batch = AdvantageBatch(samples, kl.penalties(samples))
    made = estimator(batch)
    found, metrics = made if isinstance(made, tuple) else (made, {})
    credit = found if isinstance(found, Credit) else without_critic(found)
    ends = np.cumsum(batch.scored_S)[:-1]
    parts = (np.split(values, ends) for values in (credit.advantages_N, credit.returns_N, credit.critic_N))
    credits = [Credit(*own) for own in zip(*parts, strict=True)]
    return [replace(sample, credit=own) for sample, own in zip(samples, credits, strict=True)], dict(metrics)


def without_critic(advantages_N: np.ndarray) -> Credit:
    """Credit that trains no critic."""
    return Credit(advantages_N, np.zeros_like(advantages_N), np.zeros(len(advantages_N), dtype=bool))
