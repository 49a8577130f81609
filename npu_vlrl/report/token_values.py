"""Values of each sampled token after learning, in the form in which they are recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from npu_vlrl.types import Sample

TokenValues = Mapping[tuple[str, int], Mapping[str, Sequence[float | None]]]
"""Values by trajectory and turn: a number for each token of its action under each name, None where it is not finite."""

DIGITS = 6
"""Number of recorded decimals, as of the engine's log-probabilities."""


def token_values(samples: Sequence[Sample], noted: Mapping[str, np.ndarray]) -> TokenValues:
    """Values of each token: `advantages` as the estimator set them; and where the learner `noted` them,
    `learner_logprobs` and `entropy`, in nats. `noted` holds float32 [2, N] by sample.
    """
    found = {}
    for sample in samples:
        arrays: dict[str, np.ndarray] = {}
        if sample.credit is not None:
            arrays["advantages"] = sample.credit.advantages_N
        if sample.id in noted:
            arrays["learner_logprobs"], arrays["entropy"] = noted[sample.id]
        ends = np.cumsum([len(sample.segments[i]) for i in sample.scored])[:-1]
        parts = {name: np.split(values, ends) for name, values in arrays.items()}
        turn = sample.first_turn
        for place, index in enumerate(sample.scored):
            if index in sample.trained:
                found[sample.episode, turn] = {name: _written(values[place]) for name, values in parts.items()}
                turn += 1
    return found


def _written(values: Iterable[float]) -> list[float | None]:
    return [round(float(value), DIGITS) if math.isfinite(value) else None for value in values]
