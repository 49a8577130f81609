"""Groups for the learner: failures, replacement, names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.rollout.collect import Rollout, collect
from npu_vlrl.rollout.judgements import RolloutError
from npu_vlrl.types import (
    EngineSession,
    EpisodeStatus,
    Message,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
    Task,
    Trajectory,
    Turn,
    Verdict,
)
from npu_vlrl.workflow.base import Sampling

SPECIAL = SpecialTokens((1,))
PROMPT = Segment(SegmentKind.PROMPT, (5,), SPECIAL)


class Sessions:
    def __init__(self) -> None:
        self.opened = 0

    def session(self) -> Any:
        self.opened += 1
        return object()


class Outcomes:
    """Plays each task at once: `outcome(n)` of the n-th task gives its members' rewards, or None for a failed one.

    An answer with a reward of `unjudged` got it because its judge failed.
    """

    unjudged: Sequence[float] = (-9.0,)

    def __init__(self, outcome: Callable[[int], Sequence[float | None]]) -> None:
        self.outcome = outcome

    async def run(self, task: Task, session: EngineSession, group: str, member: int, sampling: Any) -> Trajectory:
        reward = self.outcome(int(task.id))[member]
        if reward is None:
            return Trajectory(task, group, member, (), EpisodeStatus.FAILED, f"{task.id}: broken")
        action = Segment(
            SegmentKind.ACTION,
            (7,),
            SPECIAL,
            logprobs=(-1.0,),
            weight_versions=(0,),
            stop_reason=StopReason.TURN_BUDGET,
            reward=reward,
        )
        error = f"{task.id}: gone" if reward in self.unjudged else None
        turn = Turn((PROMPT,), action, "x", Verdict(reward, False), judge_error=error)
        return Trajectory(task, group, member, (turn,), EpisodeStatus.SOLVED)


def gather(
    outcome: Callable[[int], Sequence[float | None]], n_groups: int, share: float = 0.5, extra: int = 0
) -> tuple[Rollout, int]:
    """The rollout, and how many tasks it took."""
    numbers = count()

    def next_tasks(wanted: int) -> list[Task]:
        assert wanted > 0
        return [Task(str(next(numbers)), (Message("user", ("x",)),), None, "test") for _ in range(wanted)]

    sessions = Sessions()
    workflow: Any = Outcomes(outcome)

    def spread(group: Sequence[Trajectory]) -> bool:
        return len({t.turn_rewards for t in group}) > 1

    rollout = asyncio.run(
        collect(next_tasks, n_groups, workflow, sessions, 2, Sampling(), "step3", share, spread, extra)
    )
    taken = next(numbers)
    assert sessions.opened == 2 * taken
    return rollout, taken


def test_a_group_with_a_failed_member_is_left_out_whole() -> None:
    rollout, taken = gather(lambda n: (1.0, None) if n == 1 else (0.0, 1.0), 4)
    assert taken == 4 and rollout.replaced == 0
    assert [group[0].task.id for group in rollout.groups] == ["0", "2", "3"]
    assert [[t.status for t in group] for group in rollout.failed] == [[EpisodeStatus.SOLVED, EpisodeStatus.FAILED]]
    assert rollout.errors == ["1: broken"]
    assert len(rollout.trajectories) == 6


def test_too_many_failures_end_the_run_with_their_messages() -> None:
    gather(lambda n: (None, 0.0) if n < 2 else (0.0, 1.0), 4)  # half of them is allowed
    with pytest.raises(RolloutError, match=r"3 of 4 groups of step3 cannot be used:\n  0: broken\n  1: broken\n  2"):
        gather(lambda n: (None, 0.0) if n < 3 else (0.0, 1.0), 4)
    with pytest.raises(RolloutError, match="2 of 2"):
        gather(lambda n: (None, None), 2, share=1.0)


def test_too_many_failures_of_the_judge_end_the_run() -> None:
    """Also where they are on groups that would be replaced, and before others are played in their place."""
    rollout, _ = gather(lambda n: (-9.0, 1.0), 2)
    assert (rollout.judgements.answers, rollout.judgements.failed) == (4, 2)
    assert rollout.judgements.messages() == ["the judge failed on 2 of 4 answers: gone"]
    for extra in (0, 8):
        with pytest.raises(RolloutError, match=r"failed on 6 of 8 answers of step3, .*\n.* on 6 of 8 answers: gone"):
            gather(lambda n: (0.0, 1.0) if n == 0 else (-9.0, -9.0), 4, extra=extra)
    rollout, taken = gather(lambda n: (0.0, 1.0) if n else (-9.0, -9.0), 4, extra=8)
    assert taken == 5 and rollout.judgements.failed == 2 and rollout.replaced == 1


def test_members_are_told_apart_and_names_say_the_step() -> None:
    rollout, _ = gather(lambda n: (0.0, 1.0), 3)
    assert [t.group for t in rollout.trajectories] == [f"step3.0/{i}/{i}" for i in range(3) for _ in range(2)]
    assert [t.member for t in rollout.trajectories] == [0, 1] * 3


def test_equal_groups_are_replaced() -> None:
    rollout, taken = gather(lambda n: (1.0, 1.0) if n in (0, 2, 4) else (0.0, 1.0), 4, extra=8)
    assert [group[0].task.id for group in rollout.groups] == ["1", "3", "5", "6"]
    assert rollout.replaced == 3 and taken == 7


def test_without_dynamic_sampling_equal_groups_stay() -> None:
    rollout, taken = gather(lambda n: (1.0, 1.0), 4)
    assert len(rollout.groups) == taken == 4 and rollout.replaced == 0


def test_the_limit_of_extra_groups_fills_the_batch_with_equal_ones() -> None:
    rollout, taken = gather(lambda n: (0.0, 1.0) if n == 1 else (1.0, 1.0), 4, extra=5)
    assert taken == 9
    assert [group[0].task.id for group in rollout.groups] == ["1", "0", "2", "3"]
    assert rollout.replaced == 5


def test_a_replacement_that_fails_leaves_the_equal_group() -> None:
    rollout, taken = gather(lambda n: (1.0, 1.0) if n == 0 else (None, 0.0), 1, extra=4)
    assert taken == 2
    assert [group[0].task.id for group in rollout.groups] == ["0"]
    assert rollout.replaced == 0 and len(rollout.failed) == 1


def test_failures_are_counted_against_all_groups_played() -> None:
    """Four equal groups, and of their four replacements two fail: two of eight, not two of four."""
    rollout, _ = gather(lambda n: (1.0, 1.0) if n < 4 else (None, 0.0) if n < 6 else (0.0, 1.0), 4, share=0.25, extra=9)
    assert len(rollout.failed) == 2 and len(rollout.groups) == 4


outcomes = st.sampled_from([(0.0, 1.0), (1.0, 1.0), (None, 0.0)])


@settings(max_examples=60)
@given(st.lists(outcomes, min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 8))
def test_any_mixture(kinds: list[tuple[float | None, float]], n_groups: int, extra: int) -> None:
    def outcome(n: int) -> tuple[float | None, float]:
        return kinds[n % len(kinds)]

    try:
        rollout, taken = gather(outcome, n_groups, share=1.0, extra=extra)
    except RolloutError:
        assert all(outcome(n)[0] is None for n in range(n_groups))
        return
    assert 0 < len(rollout.groups) <= n_groups
    assert n_groups <= taken <= n_groups + extra
    assert len(rollout.groups) + rollout.replaced + len(rollout.failed) == taken
    names = [t.id for t in rollout.trajectories]
    assert len(set(names)) == len(names)
    assert not any(t.status is EpisodeStatus.FAILED for t in rollout.trajectories)
    if extra:  # an equal group is in the batch only where nothing else was left
        equal = [group for group in rollout.groups if group[0].turn_rewards == group[1].turn_rewards]
        assert not equal or taken == n_groups + extra or rollout.failed
