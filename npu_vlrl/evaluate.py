"""The same rollouts without learning: accuracy by data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from npu_vlrl.rollout.collect import play
from npu_vlrl.types import Engine, EpisodeStatus, Task, Trajectory
from npu_vlrl.workflow.export import RewardMode, outcome
from npu_vlrl.workflow.vision_multiturn import Sampling, VisionMultiTurnAgenticWorkflow

BATCH = 256
"""Episodes played at once."""


async def evaluate(
    tasks: Sequence[Task], workflow: VisionMultiTurnAgenticWorkflow, engine: Engine, sampling: Sampling, prefix: str
) -> list[Trajectory]:
    """Plays each task once, in order."""
    done: list[Trajectory] = []
    for start in range(0, len(tasks), BATCH):
        batch = tasks[start : start + BATCH]
        groups = await play(batch, workflow, engine, 1, sampling, f"{prefix}.{start}")
        done += [trajectory for group in groups for trajectory in group]
    return done


def accuracies(trajectories: Sequence[Trajectory], mode: RewardMode, discount: float) -> dict[str, dict[str, float]]:
    """Shares by data source, and of all under `all`; a failed sample counts as wrong.

    `accuracy` is that of the first answer, `after_retries` that of the whole episode, and `reward` the mean of what
    training would count for an episode (see `workflow.export.outcome`).
    """
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_source[trajectory.task.data_source].append(trajectory)
    sources = {source: by_source[source] for source in sorted(by_source)} | {"all": list(trajectories)}
    return {source: _shares(members, mode, discount) for source, members in sources.items()}


def _shares(members: Sequence[Trajectory], mode: RewardMode, discount: float) -> dict[str, float]:
    total = max(1, len(members))
    return {
        "tasks": len(members),
        "accuracy": sum(t.solved_first_try for t in members) / total,
        "after_retries": sum(t.solved for t in members) / total,
        "reward": sum(outcome(t, mode, discount) for t in members) / total,
        "turns": sum(len(t.turns) for t in members) / total,
        "failed": sum(t.status is EpisodeStatus.FAILED for t in members) / total,
    }
