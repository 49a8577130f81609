"""Selection of the groups that a step trains on: those whose outcomes vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from npu_vlrl.algorithms.component import FIXED, Options
from npu_vlrl.algorithms.equality import equal
from npu_vlrl.common.fields import CountOrOff
from npu_vlrl.types import Sample


class Selection(Options):
    dynamic_sampling: bool = False
    """Replaces groups whose outcomes are all equal."""
    max_extra_groups: Annotated[CountOrOff, FIXED] = 32
    """Groups that dynamic sampling may add in a step."""
    keep_groups: Annotated[float, Field(gt=0, le=1), FIXED] = 1.0
    """Share of a step's groups that is trained on: those whose outcomes vary most."""

    @model_validator(mode="after")
    def _used(self) -> Selection:
        if not self.dynamic_sampling and self.max_extra_groups != type(self).model_fields["max_extra_groups"].default:
            raise ValueError(
                "max_extra_groups: has no effect here; leave it out, or set algorithm.dynamic_sampling=true"
            )
        return self

    @property
    def extra_groups(self) -> int:
        """Number of groups that may be added in a step to replace those without spread (DAPO, arXiv 2503.14476)."""
        return self.max_extra_groups if self.dynamic_sampling else 0

    def select(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of the groups that are trained on, see `top_variance_groups`."""
        return top_variance_groups(samples, self.keep_groups)


def has_spread(samples: Sequence[Sample]) -> bool:
    """Whether the outcomes of a group's samples differ."""
    outcomes = [sample.outcome for sample in samples]
    return bool(outcomes) and not equal(min(outcomes), max(outcomes))


def top_variance_groups(samples: Sequence[Sample], share: float) -> list[Sample]:
    """The samples of the `share` of groups whose outcomes vary most, at least one group (VAGEN's and RAGEN's filter).

    The order stays. Among groups whose spread is equal up to rounding, the earlier ones are selected.
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
