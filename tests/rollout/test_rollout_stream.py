"""Groups beside a learner, with simulated engines that are slow or fail: whole, once each, in time, tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.data.source import TaskSource
from npu_vlrl.engines.base import EngineEnded, EngineError, Outcome, Request, RoundEngine
from npu_vlrl.rollout.collect import Rollout
from npu_vlrl.rollout.judgements import RolloutError
from npu_vlrl.rollout.schedule import Schedule
from npu_vlrl.rollout.stream import RETRIES, Episodes, Stream, interrupted_share
from npu_vlrl.types import Generation, StopReason, Trajectory
from npu_vlrl.workflow.base import Sampling
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from tests.support.episodes import Reply, Stage, task
from tests.support.models import loaded, tiny_folder

MEMBERS = 2
TURNS = 2


class Simulated(RoundEngine):
    """Answers each request by itself, after as many turns of the loop as `slowness` says; `fails` may raise."""

    def __init__(self, slowness: Callable[[], int], fails: Callable[[int], None] = lambda number: None) -> None:
        super().__init__()
        self.slowness, self.fails = slowness, fails
        self.asked = 0

    async def ask(self, request: Request) -> Generation:
        self.asked += 1
        number = self.asked
        for _ in range(self.slowness()):
            await asyncio.sleep(0)
        self.fails(number)
        half = (self.weight_version,) * 2
        await asyncio.sleep(0)
        versions = half + (self.weight_version,)
        return Generation((5, 6, 7), (-1.0, -2.0, -0.5), versions, StopReason.TURN_BUDGET)

    def close_session(self, number: int) -> None:
        self._open.discard(number)

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        raise NotImplementedError

    def weights_changed(self, version: int) -> dict[str, float]:
        self.weight_version = version
        return {"sync/bytes": 1.0}

    def forget_features(self) -> None:
        raise NotImplementedError

    def forget_session(self, number: int) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage(loaded(tiny_folder("qwen3")))


def tasks() -> TaskSource:
    return TaskSource.generated(lambda i: task(f"t{i}", [f"question {i}"], *[Reply("no")] * (TURNS - 1)))


def stream_of(
    stage: Stage, engine: RoundEngine, schedule: Schedule, source: TaskSource | None = None, **options: Any
) -> Stream:
    chosen = {"max_failed_share": 0.5, "has_spread": lambda group: True, **options}
    episodes = Episodes(stage.workflow(turn_tokens=3), engine, MEMBERS, Sampling(), **chosen)
    return Stream(episodes, source or tasks(), schedule)


async def train(stream: Stream, steps: int) -> list[Rollout]:
    """All steps of a learner that takes a few turns of the loop for each."""
    rollouts = []
    async with stream:
        for step in range(steps):
            rollouts.append(await asyncio.wait_for(stream.take(step), 20))
            for _ in range(step % 4):
                await asyncio.sleep(0)
            assert await stream.update(step + 1) == {"sync/bytes": 1.0}
    return rollouts


def versions(rollout: Rollout) -> set[int]:
    return {v for t in rollout.trajectories for turn in t.turns for v in turn.action.weight_versions}


def names(groups: Sequence[Sequence[Trajectory]]) -> list[str]:
    return [group[0].task.id for group in groups]


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    staleness=st.integers(0, 3),
    slowest=st.sampled_from([0, 5, 60]),
    fail_share=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_every_group_is_whole_new_and_in_time(
    stage: Stage, groups: int, staleness: int, slowest: int, fail_share: float, seed: int
) -> None:
    rng, steps = random.Random(seed), 6

    def fails(number: int) -> None:
        if rng.random() < fail_share:
            raise EngineError("no memory")

    engine = Simulated(lambda: rng.randint(0, slowest), fails)
    stream = stream_of(stage, engine, Schedule(groups, staleness, steps), max_failed_share=0.99)
    rollouts = asyncio.run(train(stream, steps))
    trained = [name for rollout in rollouts for name in names(rollout.groups)]
    failed = [name for rollout in rollouts for name in names(rollout.failed)]
    assert len(trained) == steps * groups
    assert sorted([*trained, *failed]) == sorted(f"t{i}" for i in range(len(trained) + len(failed)))  # once each
    for step, rollout in enumerate(rollouts):
        assert all([t.member for t in group] == list(range(MEMBERS)) for group in rollout.groups)
        assert all(len({t.group for t in group}) == 1 for group in rollout.groups)
        assert all(len(t.turns) == TURNS for t in rollout.trajectories)
        assert versions(rollout) <= set(range(step - staleness, step + 1))
        assert 0 <= rollout.metrics["async/staleness"] <= rollout.metrics["async/staleness_max"] <= staleness
        assert rollout.metrics["async/queue"] <= staleness * groups
    assert not engine._open, "every session is closed"
    if not fail_share:
        assert not failed


def test_play_goes_on_while_the_learner_works(stage: Stage) -> None:
    """With a staleness of 1 the groups of the next step are ready when the first update ends."""
    stream = stream_of(stage, Simulated(lambda: 0), Schedule(2, 1, 3))

    async def run() -> None:
        async with stream:
            await stream.take(0)
            busy, ready = asyncio.Event(), stream.schedule.ready

            def learn() -> str:
                loop.call_soon_threadsafe(busy.set)
                return "learned"

            loop = asyncio.get_running_loop()
            assert await stream.beside(learn) == "learned" and busy.is_set()
            for _ in range(50):
                await asyncio.sleep(0)
            assert stream.schedule.ready == 2 >= ready
            assert not stream.schedule.admit(0), "and then it waits for the update"

    asyncio.run(run())


@pytest.mark.parametrize("failures", [RETRIES, RETRIES + 1])
def test_an_episode_that_an_engine_failed_is_tried_again_before_it_counts(stage: Stage, failures: int) -> None:
    left = [failures]

    def fails(number: int) -> None:
        if left[0]:
            left[0] -= 1
            raise EngineError("engine 1: no memory")

    engine = Simulated(lambda: 0, fails)
    stream = stream_of(stage, engine, Schedule(1, 0, 1))
    stream.episodes = Episodes(**{**stream.episodes.__dict__, "group_size": 1})
    (rollout,) = asyncio.run(train(stream, 1))
    assert rollout.metrics["async/retried_episodes"] == RETRIES
    if failures == RETRIES:
        assert names(rollout.groups) == ["t0"] and rollout.failed == []
    else:
        assert names(rollout.groups) == ["t1"] and rollout.errors == ["t0: engine 1: no memory"]
    assert engine.asked == failures + TURNS


def test_an_engine_that_is_gone_ends_the_run(stage: Stage) -> None:
    def fails(number: int) -> None:
        if number == 7:
            raise EngineEnded("engine 1: the disk is full")

    stream = stream_of(stage, Simulated(lambda: 0, fails), Schedule(1, 1, 9))
    with pytest.raises(EngineEnded, match="the disk is full"):
        asyncio.run(train(stream, 9))


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_too_many_failures_end_the_run(stage: Stage, share: float) -> None:
    def fails(number: int) -> None:
        raise ValueError("not finite")

    stream = stream_of(stage, Simulated(lambda: 0, fails), Schedule(4, 1, 9), max_failed_share=share)
    with pytest.raises(RolloutError, match="cannot be used:\n  t0: not finite\n  t1: not finite"):
        asyncio.run(train(stream, 9))


def test_too_many_failures_of_the_judge_end_the_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The episodes are whole, and half of the answers of those from t4 on were not judged."""
    whole = VisionMultiTurnAgenticWorkflow.run

    async def unjudged(*given: Any) -> Trajectory:
        played = await whole(*given)
        if played.task.id in ("t0", "t1", "t2", "t3"):
            return played
        *first, last = played.turns
        return replace(played, turns=(*first, replace(last, judge_error=f"{played.task.id}: gone")))

    monkeypatch.setattr(VisionMultiTurnAgenticWorkflow, "run", unjudged)
    stream = stream_of(stage, Simulated(lambda: 0), Schedule(4, 0, 9), max_failed_share=0.4)
    with pytest.raises(RolloutError, match=r"failed on 8 of 16 answers of step1, .*\n.*: gone"):
        asyncio.run(train(stream, 9))
    stream = stream_of(stage, Simulated(lambda: 0), Schedule(4, 0, 2), max_failed_share=0.5)
    assert [step.judgements.failed for step in asyncio.run(train(stream, 2))] == [0, 8]


def test_a_source_that_ends_ends_the_run(stage: Stage) -> None:
    def make(index: int) -> Any:
        if index > 4:
            raise OSError("the disk is gone")
        return task(f"t{index}", ["x"])

    stream = stream_of(stage, Simulated(lambda: 0), Schedule(1, 1, 9), TaskSource.generated(make))
    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(train(stream, 9))


def test_groups_without_spread_are_replaced_up_to_a_number_for_each_step(stage: Stage) -> None:
    flat = {"t0", "t1", "t2", "t3"}
    spread = {"max_extra_groups": 3, "has_spread": lambda group: group[0].task.id not in flat}
    stream = stream_of(stage, Simulated(lambda: 0), Schedule(2, 0, 2), **spread)
    first, second = asyncio.run(train(stream, 2))
    assert [first.replaced, second.replaced] == [3, 0]
    assert names(first.groups) == ["t3", "t4"] and names(second.groups) == ["t5", "t6"]


def test_tasks_that_were_not_trained_are_played_again_after_a_resume(stage: Stage) -> None:
    """Some groups are ready, some are being played; one has failed and one is trained."""

    def fails(number: int) -> None:
        if number in (1, 2):
            raise ValueError("bad sample")

    source = tasks()
    stream = stream_of(stage, Simulated(lambda: 1, fails), Schedule(1, 2, 9), source, max_failed_share=0.9)

    async def first_step() -> tuple[list[str], dict[str, Any]]:
        async with stream:
            rollout = await stream.take(0)
            assert names(rollout.failed) == ["t0"]
            return names(rollout.groups), stream.state()

    trained, state = asyncio.run(first_step())
    assert trained == ["t1"] and state["again"] == [2, 3] and state["position"] == 4
    assert stream.state() == state, "also after the end"
    resumed = tasks()
    resumed.load_state_dict(state)
    assert [one.id for one in resumed.next(4)] == ["t2", "t3", "t4", "t5"]


def test_the_share_of_interrupted_tokens(stage: Stage) -> None:
    stream = stream_of(stage, Simulated(lambda: 0), Schedule(1, 0, 1))
    (rollout,) = asyncio.run(train(stream, 1))
    assert interrupted_share(rollout.groups) == 0.0
    turn = rollout.trajectories[0].turns[0]
    object.__setattr__(turn.action, "weight_versions", (0, 0, 1))
    assert interrupted_share(rollout.groups) == 1 / (MEMBERS * TURNS)
