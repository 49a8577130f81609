"""Rollout of the groups of a step: every task is played by `group_size` members at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from npu_vlrl.rollout.judgements import Judgements, RolloutError
from npu_vlrl.types import Engine, EpisodeStatus, Task, Trajectory
from npu_vlrl.workflow.base import Sampling, Workflow


@dataclass
class Rollout:
    """The groups of one step.

    A group with a failed member is left out completely: its members would be compared with the remaining ones only.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    failed: list[list[Trajectory]] = field(default_factory=list)
    replaced: int = 0
    """Number of groups that dynamic sampling replaced because they had no spread."""
    judgements: Judgements = field(default_factory=Judgements)
    """Judgements of all groups that were played, including replaced ones."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics of the rollout, such as staleness."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def errors(self) -> list[str]:
        """Distinct errors of the failed groups, whose members mostly fail for the same reason."""
        return list(dict.fromkeys(t.error for group in self.failed for t in group if t.error is not None))


async def play(
    tasks: Sequence[Task],
    workflow: Workflow,
    engine: Engine,
    group_size: int,
    sampling: Sampling,
    prefix: str,
) -> list[list[Trajectory]]:
    """Plays every task `group_size` times, all at once; `prefix` makes the group names unique, e.g. `step3`."""
    members = [(task, f"{prefix}/{i}/{task.id}", m) for i, task in enumerate(tasks) for m in range(group_size)]
    sessions = [engine.session() for _ in members]
    episodes = [
        workflow.run(task, session, group, member, sampling)
        for (task, group, member), session in zip(members, sessions, strict=True)
    ]
    done = await asyncio.gather(*episodes)
    return [list(done[i : i + group_size]) for i in range(0, len(done), group_size)]


async def collect(
    next_tasks: Callable[[int], Sequence[Task]],
    n_groups: int,
    workflow: Workflow,
    engine: Engine,
    group_size: int,
    sampling: Sampling,
    prefix: str,
    max_failed_share: float,
    has_spread: Callable[[Sequence[Trajectory]], bool],
    max_extra_groups: int = 0,
) -> Rollout:
    """Collects the rollout of a step. With `max_extra_groups` (DAPO's dynamic sampling, arXiv 2503.14476), groups
    without `has_spread`, which have no gradient, are replaced until the batch is full or that many groups were added;
    the rest is filled with replaced ones, so that the batch is never empty.

    Raises RolloutError when more than `max_failed_share` of the groups, or of the judgements, failed, with their
    messages.
    """
    rollout = Rollout()
    flat: list[list[Trajectory]] = []
    wanted, extra = n_groups, max_extra_groups
    while wanted > 0:
        groups = await play(next_tasks(wanted), workflow, engine, group_size, sampling, f"{prefix}.{len(flat)}")
        n_flat = len(flat)
        for group in groups:
            rollout.judgements.add(group)
            if has_failed(group):
                rollout.failed.append(group)
            elif max_extra_groups and not has_spread(group):
                flat.append(group)
            else:
                rollout.groups.append(group)
        rollout.judgements.check(max_failed_share, prefix)  # before replacements are played
        wanted = min(len(flat) - n_flat, extra)
        extra -= wanted
    played = len(rollout.groups) + len(flat) + len(rollout.failed)
    kept = flat[: n_groups - len(rollout.groups)]
    rollout.replaced = len(flat) - len(kept)
    rollout.groups += kept
    if len(rollout.failed) > max_failed_share * played or not rollout.groups:
        shown = "\n  ".join(rollout.errors[:5])
        raise RolloutError(f"{len(rollout.failed)} of {played} groups of {prefix} cannot be used:\n  {shown}")
    return rollout


def has_failed(group: Sequence[Trajectory]) -> bool:
    """Whether a member of the group failed, so that the group cannot be used."""
    return any(trajectory.status is EpisodeStatus.FAILED for trajectory in group)
