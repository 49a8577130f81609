"""The rule of asynchronous training, on random schedules: nothing is lost, doubled or too old; all steps are made."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.rollout.schedule import Schedule


def simulate(schedule: Schedule, steps: int, seed: int, fail_share: float) -> int:
    """A training of random luck: what may happen next happens in any order. Returns how many groups were given up.

    Everything is checked from what the simulator itself noted, and not from what the schedule says.
    """
    rng = random.Random(seed)
    groups, eta = schedule.groups, schedule.staleness
    version = taken_steps = 0
    began: dict[int, int] = {}
    playing: list[int] = []
    trained: list[int] = []
    failed: list[int] = []
    while version < steps:
        learning = taken_steps > version
        actions = [*(["begin"] if schedule.admit(version) else []), *(["end"] if playing else [])]
        actions += ["update"] if learning else ["take"]
        match rng.choice(actions):
            case "begin":
                number = schedule.begin(version)
                assert number not in began, "two groups with one number"
                began[number] = version
                playing.append(number)
            case "end":
                number = playing.pop(rng.randrange(len(playing)))
                if rng.random() < fail_share:
                    schedule.fail(number)
                    failed.append(number)
                else:
                    schedule.finish(number)
            case "take":
                chosen = schedule.take(taken_steps)
                if chosen is None:
                    assert len(actions) > 1, "a step waits, and nothing can happen"
                    continue
                assert len(chosen) == groups and not set(chosen) & {*trained, *failed, *playing}
                for number, staleness in chosen.items():
                    assert staleness == taken_steps - began[number] and 0 <= staleness <= eta, "too old"
                trained += chosen
                taken_steps += 1
            case "update":
                version += 1
        assert len(began) - len(trained) - len(failed) <= (eta + 1) * groups, "the queue grows"
    assert len(set(trained)) == len(trained) == steps * groups
    assert {*trained, *failed} == set(began), "a group was lost"
    return len(failed)


@settings(max_examples=300, deadline=None)
@given(
    groups=st.integers(1, 5),
    staleness=st.integers(0, 4),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    fail_share=st.sampled_from([0.0, 0.1, 0.6]),
)
def test_nothing_is_lost_doubled_or_too_old(
    groups: int, staleness: int, steps: int, seed: int, fail_share: float
) -> None:
    failed = simulate(Schedule(groups, staleness, steps), steps, seed, fail_share)
    assert fail_share or not failed


class AdmitsTooMany(Schedule):
    """One update more than allowed."""

    def admit(self, version: int) -> bool:
        return super().admit(version + 1)


class NeverWaits(Schedule):
    """For a group that must be trained now."""

    def _in_time(self, deadlines: Sequence[int], step: int) -> bool:
        return True


@pytest.mark.parametrize("wrong", [AdmitsTooMany, NeverWaits])
def test_a_wrong_bound_is_noticed(wrong: type[Schedule]) -> None:
    caught = 0
    for seed in range(20):
        try:
            simulate(wrong(2, 1, 8), 8, seed, 0.1)
        except AssertionError:
            caught += 1
    assert caught >= 5


def test_a_straggler_lets_others_pass_until_its_last_step() -> None:
    """Two groups a step, staleness 1. Groups 0..3 begin with version 0, so step 1 is the last one for them."""
    schedule = Schedule(groups=2, staleness=1, steps=9)
    assert [schedule.begin(0) for _ in range(4)] == [0, 1, 2, 3] and not schedule.admit(0)
    for number in (1, 2, 3):
        schedule.finish(number)
    assert schedule.take(0) == {1: 0, 2: 0}  # group 0 is passed by
    assert not schedule.admit(0)  # those for step 2 wait for version 1
    assert [schedule.begin(1) for _ in range(2)] == [4, 5] and not schedule.admit(1)
    schedule.finish(4)
    schedule.finish(5)
    assert schedule.take(1) is None, "3 and 4 are ready, but then 0 would come too late"
    schedule.finish(0)
    assert schedule.take(1) == {0: 1, 3: 1}
    assert schedule.outstanding == [4, 5] and schedule.ready == 2


def test_without_staleness_a_step_plays_its_own_groups() -> None:
    schedule = Schedule(groups=2, staleness=0, steps=2)
    assert [schedule.begin(0), schedule.begin(0), schedule.admit(0)] == [0, 1, False]
    schedule.fail(0)
    assert schedule.admit(0), "another one in its place"
    schedule.finish(schedule.begin(0))
    assert schedule.take(0) is None
    schedule.finish(1)
    assert schedule.take(0) == {1: 0, 2: 0}
    assert not schedule.admit(0) and schedule.admit(1)
    schedule.begin(1), schedule.begin(1)
    assert not schedule.admit(2), "there is no third step"


def test_a_resumed_run_begins_at_its_step() -> None:
    schedule = Schedule(groups=1, staleness=1, steps=9, step=5)
    assert schedule.admit(5)
    schedule.begin(5), schedule.begin(5)
    assert not schedule.admit(5)
    schedule.finish(0)
    assert schedule.take(5) == {0: 0}
