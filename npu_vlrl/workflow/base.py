"""Interface of a workflow: its inputs and its result."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from npu_vlrl.types import (
    EngineSession,
    Generation,
    SamplingParams,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
    Task,
    Trajectory,
)


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of the turns of a rollout; each turn has its own seed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def for_turn(self, group: str, member: int, turn: int, max_new_tokens: int) -> SamplingParams:
        key = f"{self.seed}/{group}/{member}/{turn}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7])
        return SamplingParams(max_new_tokens, self.temperature, self.top_p, self.top_k, seed)


def action_segment(
    generation: Generation, special: SpecialTokens, reward: float = 0.0, stop_reason: StopReason | None = None
) -> Segment:
    """The ACTION of a generation. `stop_reason` replaces the engine's. Raises ValueError as `Segment` does."""
    return Segment(
        SegmentKind.ACTION,
        generation.token_ids,
        special,
        logprobs=generation.logprobs,
        weight_versions=generation.weight_versions,
        stop_reason=stop_reason or generation.stop_reason,
        reward=reward,
        routes=generation.routes,
    )


class Workflow(Protocol):
    """Plays episodes: requests the policy's turns from the engine and their rewards from an environment.

    `vision_multiturn.VisionMultiTurnAgenticWorkflow` is the package's workflow. A user's own is named by
    `workflow.name=path/to/file.py:Class`, a class or function that is called as

        Class(config, renderer, new_environment, schemas, **workflow.options)

    config: WorkflowConfig, the section `workflow`
    renderer: render.Renderer, messages to token ids and back
    new_environment: () -> Environment, one for each episode; `reset`, `step` and `close` are the workflow's to call
    schemas: OpenAI schemas of the functions that the policy is told it may call
    """

    async def run(self, task: Task, session: EngineSession, group: str, member: int, sampling: Sampling) -> Trajectory:
        """Plays one episode of `task`, and returns `Trajectory(task, group, member, turns, status)`.

        Every ACTION of its turns must hold the ids and logprobs of a `Generation` of `session`, with the context that
        the engine was given: only then does the learner compute the same logprobs. Turn k, from 0, is drawn with
        `sampling.for_turn(group, member, k, max_new_tokens)`, so that a run repeats.

        Closes `session` in any case. A sample that cannot be used gives a trajectory of status FAILED with `error`;
        DataError and ValueError do the same where a workflow of the user's own raises them.
        """
        ...
