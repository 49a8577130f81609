"""Learning rates by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_vlrl.config import OptimConfig
from npu_vlrl.learner.schedule import learning_rate


def rates(schedule: Any, warmup: int, total: int) -> list[float]:
    config = OptimConfig(lr=8.0, schedule=schedule, warmup_steps=warmup)
    return [learning_rate(config, step, total) for step in range(total)]


def test_by_hand() -> None:
    assert rates("constant", 0, 3) == [8, 8, 8]
    assert rates("constant", 4, 6) == [2, 4, 6, 8, 8, 8]
    assert rates("linear", 0, 4) == [8, 6, 4, 2]
    assert rates("linear", 2, 6) == [4, 8, 8, 6, 4, 2]
    # cosine: 8 * (1 + cos(pi * i / 4)) / 2 for i = 0..3, after one step of warm-up
    assert rates("cosine", 1, 5) == pytest.approx([8, 8, 6.828427, 4, 1.171573])


def test_steps_of_several_updates() -> None:
    """Two steps of warm-up with three updates each; then a line down over two steps."""
    config = OptimConfig(lr=6.0, schedule="linear", warmup_steps=2)
    found = [learning_rate(config, update, 12, in_step=3) for update in range(12)]
    assert found == pytest.approx([1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1])


def test_warm_up_alone_and_a_run_of_one_step() -> None:
    assert rates("cosine", 4, 2) == [2, 4]  # the run ends before the warm-up does
    assert rates("linear", 1, 1) == [8]
    assert rates("linear", 0, 1) == [8]


@pytest.mark.parametrize(("schedule", "expected"), [("constant", 8.0), ("linear", 0.0), ("cosine", 0.0)])
def test_past_the_end_it_stays_where_it_ended(schedule: Any, expected: float) -> None:
    config = OptimConfig(lr=8.0, schedule=schedule, warmup_steps=2)
    assert [learning_rate(config, step, 10) for step in (10, 15, 18, 100)] == pytest.approx([expected] * 4)


def test_a_longer_run_goes_on_with_the_rate_of_its_own_length() -> None:
    """Resumed after 4 of 8 steps with 16 in all: the rate is what an unbroken run of 16 steps would have."""
    config = OptimConfig(lr=8.0, schedule="linear")
    assert learning_rate(config, 4, 8) == 4.0
    assert learning_rate(config, 4, 16) == 6.0


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 40))
def test_rises_in_the_warm_up_and_never_again(schedule: Any, warmup: int, total: int) -> None:
    found = rates(schedule, warmup, total)
    assert all(0 < rate <= 8 for rate in found)
    rising, falling = found[:warmup], found[warmup:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
