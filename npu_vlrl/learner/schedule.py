"""Learning-rate schedules as a function of the step, so that resuming needs no state but the count."""

from __future__ import annotations

import math

from npu_vlrl.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """The rate of optimiser step `step` (from 0) of `total`: linear warm-up to `lr`, then constant, or down to 0 along
    a line or half a cosine. A run that is resumed with another `total` goes on with the rate that the new one gives.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    factor = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[config.schedule]
    return config.lr * factor
