"""Guard of the engines: after each update of the weights, their logprobs of a probe must match the learner's."""

from __future__ import annotations

import numpy as np

from npu_vlrl.engines.base import RoundEngine
from npu_vlrl.learner.gap import LearnerError, allowed_gap
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.rollout.probe import TEMPERATURE, Probe
from npu_vlrl.types import Generation, Sample


class EngineGuard:
    """Compares all engines with the learner. Call it with the version of new weights, before a round begins with them.

    It changes neither random states nor counts, and leaves nothing but cached features of its images.
    """

    def __init__(self, engine: RoundEngine, learner: LearnerGroup, probe: Probe) -> None:
        self._engine = engine
        self._learner = learner
        self._probe = probe

    def __call__(self, version: int) -> dict[str, float]:
        """Returns `probe_gap`, the largest |learner - engine| of a log-probability in nats, and `probe_tokens`, the
        number of compared tokens of each engine.

        Raises LearnerError with the name of an engine whose gap is above `algorithm.max_logprob_gap`, or that cannot
        answer, and the errors of an engine that is gone.
        """
        contexts = self._probe.contexts(version)
        samples: dict[str, list[Sample]] = {}
        for name, outcomes in self._engine.probe(self._probe.requests(contexts)).items():
            answers = [outcome for outcome in outcomes if isinstance(outcome, Generation) and outcome.token_ids]
            if len(answers) < len(outcomes):
                fault = next((str(outcome) for outcome in outcomes if isinstance(outcome, Exception)), "no token came")
                raise LearnerError(f"{_with(name, version)} cannot continue the probe: {fault}")
            samples[name] = self._probe.samples(name, contexts, answers)
        ours = self._learner.logprobs([sample for own in samples.values() for sample in own], TEMPERATURE)
        gaps = {name: np.concatenate([_gap(sample, ours) for sample in own]) for name, own in samples.items()}
        learner = self._learner.own
        allowed = allowed_gap(learner.algorithm, learner.policy.dtype)
        for name, gap_N in gaps.items():
            if not (gap := float(gap_N.max())) <= allowed:  # NaN is not, either
                raise LearnerError(
                    f"{_with(name, version)} gives a token of the probe a log-probability that differs by {gap:.3g} "
                    f"from the learner's, more than algorithm.max_logprob_gap={allowed}: it does not hold the "
                    "learner's weights, or computes with features or keys and values of earlier ones. Go on from the "
                    "last checkpoint with run.if_exists=resume"
                )
        largest = max(float(gap_N.max()) for gap_N in gaps.values())
        return {"probe_gap": largest, "probe_tokens": min(map(len, gaps.values()))}


def _with(engine: str, version: int) -> str:
    return f"after the update to version {version} of the weights {engine}"


def _gap(sample: Sample, ours: dict[str, np.ndarray]) -> np.ndarray:
    gap_N: np.ndarray = np.abs(ours[sample.id] - np.asarray(sample.behaviour_logprobs))
    return gap_N
