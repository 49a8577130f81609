"""Limit and check of the gap between the log-probabilities of engine and learner."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from npu_vlrl.algorithms import AlgorithmConfig
from npu_vlrl.algorithms.metrics import Metrics, reduce_metrics


class LearnerError(RuntimeError):
    """The update would be wrong, e.g. learner and engine disagree about the policy."""


def allowed_gap(config: AlgorithmConfig, dtype: torch.dtype) -> float:
    """Largest |learner - engine| of a token, in nats, for a model in `dtype`."""
    return config.max_logprob_gap or (1.0 if dtype.itemsize == 2 else 0.05)


def logprob_gap(metrics: Iterable[Metrics]) -> dict[str, float]:
    """The metrics `logprob_gap`, unless no token was compared, and `logprob_gap_tokens`, from the metrics of the first
    mini-batch of a step, whose policy is the behaviour policy.
    """
    reduced = reduce_metrics(metrics)
    keys = {"logprob_gap": "gap_max", "logprob_gap_tokens": "gap_max_tokens"}
    return {name: reduced[key] for name, key in keys.items() if key in reduced}


def check_gap(metrics: Iterable[Metrics], allowed: float) -> None:
    """Raises LearnerError when a micro-batch has a `gap_max` above the allowed one. NaN passes; the step of the
    optimiser checks for it.
    """
    # not max() over all: NaN would hide the gap of another micro-batch
    gap = max((g for part in metrics if (g := float(part["gap_max"])) > allowed), default=0.0)
    if gap:
        raise LearnerError(
            f"the learner's log-probability of a token differs by {gap:.3g} from the engine's, more than "
            f"algorithm.max_logprob_gap={allowed}: engine and learner do not hold the same "
            "weights, images or tokens, or their precision is too low"
        )
