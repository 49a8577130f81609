"""Learning-rate schedules as a function of the step, so that resuming needs no state but the count."""

from __future__ import annotations

import math

from npu_vlrl.config import Config, OptimConfig


def learning_rate(config: OptimConfig, step: int, total: int, in_step: int = 1) -> float:
    """The rate of optimiser step `step` (from 0) of `total`, `in_step` of which make a step of training: linear warm-up
    to `lr`, then constant, or decay to 0 along a line or half a cosine. A run that is resumed with another `total` uses
    the schedule of the new one.
    """
    warmup = config.warmup_steps * in_step
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    factor = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[config.schedule]
    return config.lr * factor


def rate_jump(before: Config, now: Config, updates: int) -> str | None:
    """Warning about a jump of the learning rate after `updates` optimiser steps, where a run is resumed with another
    `train.steps`; None where there is none.
    """
    optim, in_step = now.optim, now.algorithm.updates * now.algorithm.epochs
    steps = before.train.steps, now.train.steps
    old, new = (learning_rate(optim, updates, total * in_step, in_step) for total in steps)
    if old == new:
        return None
    return (
        f"train.steps was {steps[0]} and is {steps[1]}: the {optim.schedule} schedule ends there now, so the learning "
        f"rate goes on with {new:.3g} where it would have been {old:.3g}; for the old curve resume with "
        f"train.steps={steps[0]}"
    )
