"""Sources of the groups of a training's steps: played in turn with the learner, or continuously beside it.

in turn    play 0 | learn 0 | play 1 | learn 1 | ...
Stream     play ----------------------------------
           wait   | learn 0 | learn 1 | ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from npu_vlrl.data.source import TaskSource
from npu_vlrl.engines.base import Check, EngineEnded, EngineError, RoundEngine, no_check
from npu_vlrl.engines.remote import in_thread
from npu_vlrl.network.world import PeerError
from npu_vlrl.rollout.collect import Rollout, has_failed
from npu_vlrl.rollout.judgements import Judgements, RolloutError
from npu_vlrl.rollout.schedule import Schedule
from npu_vlrl.types import EpisodeStatus, Task, Trajectory
from npu_vlrl.workflow.base import Sampling, Workflow

T = TypeVar("T")

RETRIES = 2
"""Number of retries of an episode after errors of an engine."""

HOPELESS = 100
"""Number of failed groups, as a multiple of the groups of a step, that ends the run whatever share may fail."""


class InTurn:
    """Synchronous rollouts: the engine rests while the learner works, and samples all tokens with current weights."""

    def __init__(self, collect: Callable[[int], Awaitable[Rollout]], source: TaskSource, engine: RoundEngine) -> None:
        """`collect` plays the groups of a step."""
        self.take = collect
        self.state = source.state_dict
        self._engine = engine

    async def __aenter__(self) -> InTurn:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing: no episode is running."""

    async def beside(self, work: Callable[[], T]) -> T:
        return work()

    async def update(self, version: int, check: Check = no_check) -> dict[str, float]:
        return await self._engine.update(version, check)


@dataclass(frozen=True)
class Episodes:
    """Settings of the episodes of a stream."""

    workflow: Workflow
    engine: RoundEngine
    group_size: int
    sampling: Sampling
    max_failed_share: float
    has_spread: Callable[[Sequence[Trajectory]], bool]
    max_extra_groups: int = 0
    """Number of groups without spread that are replaced for each step, see `collect`."""


@dataclass
class _SinceLastStep:
    failed: list[list[Trajectory]] = field(default_factory=list)
    judgements: Judgements = field(default_factory=Judgements)
    replaced: int = 0
    retried: int = 0


@dataclass
class _Group:
    position: int
    """Position of the group's task in the source."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """All trajectories of the group, once it is complete."""


class Stream:
    """Asynchronous rollouts: as many groups are played as the `Schedule` admits, and a step takes complete groups.

    A failed group is replaced by another. Use it as a context, whose end cancels the episodes.
    """

    def __init__(
        self,
        episodes: Episodes,
        source: TaskSource,
        schedule: Schedule,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`enter_thread` is called first in each thread of the learner."""
        self.enter_thread = enter_thread
        self.episodes = episodes
        self.source = source
        self.schedule = schedule
        self._groups: dict[int, _Group] = {}
        """Outstanding groups by number."""
        self._jobs: set[asyncio.Task[list[Trajectory]]] = set()
        self._since = _SinceLastStep()
        self._error: BaseException | None = None
        """Error that ends the run, because no other group could replace the failed one."""
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Stream:
        self._fill()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        if kind is None or not issubclass(kind, (EngineError, PeerError)):  # else it could wait for a dead engine
            await self.episodes.engine.rest()

    async def take(self, step: int) -> Rollout:
        """Waits for the groups of a step, and takes them.

        Raises RolloutError when more than `max_failed_share` of the groups, or of the judgements, since the last step
        failed, and the errors of engines and of the source of tasks.
        """
        began = time.monotonic()
        while (chosen := self._choose(step)) is None:
            self._changed.clear()
            await self._changed.wait()
        since, self._since = self._since, _SinceLastStep()
        since.judgements.check(self.episodes.max_failed_share, f"step{step}")
        groups = [self._groups.pop(number).trajectories for number in chosen]
        metrics = {
            "async/staleness": sum(chosen.values()) / len(chosen),
            "async/staleness_max": max(chosen.values()),
            "async/queue": self.schedule.ready,
            "async/waited_seconds": time.monotonic() - began,
            "async/retried_episodes": since.retried,
        }
        if (interrupted := interrupted_share(groups)) is not None:
            metrics["async/interrupted_tokens"] = interrupted
        self._fill()
        return Rollout(groups, since.failed, since.replaced, since.judgements, metrics)

    async def beside(self, work: Callable[[], T]) -> T:
        """Runs the learner's work in a thread, while episodes continue."""

        def enter_and_work() -> T:
            self.enter_thread()
            return work()

        return await in_thread(enter_and_work)

    async def update(self, version: int, check: Check = no_check) -> dict[str, float]:
        """Brings new weights to the engine, which interrupts turns; see `RoundEngine.update`."""
        metrics = await self.episodes.engine.update(version, check)
        self._fill()
        return metrics

    def state(self) -> dict[str, Any]:
        """State of the source, from which tasks that were drawn and not trained are drawn again."""
        return self.source.state_dict([self._groups[number].position for number in self.schedule.outstanding])

    def _choose(self, step: int) -> dict[int, int] | None:
        if self._error is not None:
            raise self._error
        return self.schedule.take(step)

    def _fill(self) -> None:
        """Begins all groups that the schedule admits."""
        while self._error is None and self.schedule.admit(version := self.episodes.engine.weight_version):
            position, task = self.source.draw()
            number = self.schedule.begin(version)
            self._groups[number] = _Group(position)
            job = asyncio.get_running_loop().create_task(self._play(task, f"task{position}/{task.id}"))
            self._jobs.add(job)
            job.add_done_callback(partial(self._ended, number))

    async def _play(self, task: Task, group: str) -> list[Trajectory]:
        return await asyncio.gather(*(self._episode(task, group, i) for i in range(self.episodes.group_size)))

    async def _episode(self, task: Task, group: str, member: int) -> Trajectory:
        attempts = 0
        while True:
            session = self.episodes.engine.session()
            try:
                return await self.episodes.workflow.run(task, session, group, member, self.episodes.sampling)
            except EngineEnded:
                raise
            except EngineError as error:
                if attempts == RETRIES:
                    return Trajectory(task, group, member, (), EpisodeStatus.FAILED, f"{task.id}: {error}")
            attempts += 1
            self._since.retried += 1

    def _ended(self, number: int, job: asyncio.Task[list[Trajectory]]) -> None:
        self._jobs.discard(job)
        if job.cancelled():
            return
        try:
            self._sort(number, job.result())
            self._fill()
        except Exception as error:
            self._error = error
        self._changed.set()

    def _sort(self, number: int, trajectories: list[Trajectory]) -> None:
        """Keeps a complete group if it can be trained on, and gives it up otherwise."""
        since, episodes = self._since, self.episodes
        since.judgements.add(trajectories)
        if has_failed(trajectories):
            since.failed.append(trajectories)
        elif since.replaced < episodes.max_extra_groups and not episodes.has_spread(trajectories):
            since.replaced += 1
        else:
            self._groups[number].trajectories = trajectories
            self.schedule.finish(number)
            return
        self.schedule.fail(number)
        del self._groups[number]
        self._check_failures()

    def _check_failures(self) -> None:
        n_failed, wanted = len(self._since.failed), self.schedule.groups
        played = n_failed + self._since.replaced + wanted
        if n_failed > self.episodes.max_failed_share * played or n_failed >= HOPELESS * wanted:
            errors = "\n  ".join(Rollout(failed=self._since.failed).errors[:5])
            raise RolloutError(f"{n_failed} of the last {played} groups cannot be used:\n  {errors}")


def interrupted_share(groups: Sequence[Sequence[Trajectory]]) -> float | None:
    """Share of the sampled tokens that are in turns with tokens of several versions; None without sampled tokens."""
    turns = [turn.action for group in groups for trajectory in group for turn in trajectory.turns]
    tokens = sum(map(len, turns))
    interrupted = sum(len(turn) for turn in turns if len(set(turn.weight_versions)) > 1)
    return interrupted / tokens if tokens else None
