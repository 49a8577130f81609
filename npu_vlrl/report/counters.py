"""Metrics that count over a whole training, also across stops and resumes."""

from __future__ import annotations

from collections.abc import Mapping

from npu_vlrl.engines.base import RoundEngine
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.model.vision import VisionFeatures


class Counters:
    """Counters of engines and learner since the end of the warm start, by the names of the metrics."""

    def __init__(self, engine: RoundEngine, vision: VisionFeatures) -> None:
        self._engine = engine
        self._vision = vision
        self._before: dict[str, float] = {}
        """Counts of the processes before this one, less the counts of this one's warm start."""

    def begin(self, learner: LearnerGroup, before: Mapping[str, float]) -> None:
        """Continues from the counts `before`, which a new run has none of."""
        self._before = {name: before.get(name, 0) - count for name, count in self._here(learner).items()}

    def values(self, learner: LearnerGroup) -> dict[str, float]:
        return {name: count + self._before.get(name, 0) for name, count in self._here(learner).items()}

    def _here(self, learner: LearnerGroup) -> dict[str, float]:
        """Counts of this process."""
        counts, vision = self._engine.counts, self._vision
        return {
            "engine/tokens_requested": counts.tokens_requested,
            "engine/tokens_prefilled": counts.tokens_prefilled,
            "engine/tokens_decoded": counts.tokens_decoded,
            "learner/tokens_referenced": learner.tokens_referenced,
            "learner/tokens_computed": learner.tokens_computed,
            "images_referenced": vision.referenced + counts.images_referenced,
            "images_encoded": vision.encoded + counts.images_encoded,
        }
