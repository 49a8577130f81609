"""Judging runs beside the event loop, and answers are judged beside each other: shown by what would never end else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from npu_vlrl.types import JudgeError, Message, Task, Verdict
from npu_vlrl.workflow.rewards import InlineJudge, JudgePool, make_judge

FILE = '''
import time
from pathlib import Path

def wait_for(path):
    """Until the file is there, at most 20 seconds."""
    for _ in range(2000):
        if Path(path).exists():
            return True
        time.sleep(0.01)
    return False

def after_the_loop(task, text, history, images):
    """The answer names a file that only the event loop makes, after all answers were handed in."""
    return wait_for(text)

def meet(task, text, history, images):
    """Each of two answers makes a file and waits for the file of the other."""
    mine, other = text.split()
    Path(mine).touch()
    return wait_for(other)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "waits.py"
    path.write_text(FILE)
    return path


def a_task(number: int) -> Task:
    return Task(f"t/{number}", (Message("user", ("?",)),), "5", "test")


async def hand_in(judge: JudgePool | InlineJudge, signal: Path, count: int) -> list[Verdict]:
    """Hands `count` answers in, then makes the file that they wait for."""

    async def go() -> None:
        signal.touch()

    judgements = [judge.judge(a_task(i), str(signal), ()) for i in range(count)]
    return (await asyncio.gather(*judgements, go()))[:count]


def test_256_answers_wait_for_the_event_loop_and_it_does_not_wait_for_them(file: Path, tmp_path: Path) -> None:
    pool = make_judge(f"{file}:after_the_loop", {}, workers=2, deadline_s=30.0)
    assert isinstance(pool, JudgePool)
    verdicts = asyncio.run(hand_in(pool, tmp_path / "go", 256))
    pool.close()
    assert [verdict.solved for verdict in verdicts] == [True] * 256


def test_a_judge_that_blocks_the_loop_would_not_pass(tmp_path: Path) -> None:
    signal = tmp_path / "go"
    blocking = InlineJudge(lambda _, text: Verdict(float(Path(text).exists()), Path(text).exists()), lambda _: None)
    assert [verdict.solved for verdict in asyncio.run(hand_in(blocking, signal, 3))] == [False] * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_two_answers_are_judged_at_the_same_time_by_two_workers_only(file: Path, tmp_path: Path, workers: int) -> None:
    pool = make_judge(f"{file}:meet", {}, workers=workers, deadline_s=10.0 if workers == 2 else 1.0)
    a, b = tmp_path / "a", tmp_path / "b"

    async def both() -> Sequence[Verdict | BaseException]:
        judgements = (pool.judge(a_task(0), f"{a} {b}", ()), pool.judge(a_task(1), f"{b} {a}", ()))
        return await asyncio.gather(*judgements, return_exceptions=True)

    first, second = asyncio.run(both())
    pool.close()
    if workers == 2:
        assert first == second == Verdict(1.0, True)
    else:  # alone, the first waits in vain; the second then finds its file
        assert isinstance(first, JudgeError) and second == Verdict(1.0, True)


def test_hostile_answers_among_256_are_the_only_ones_without_a_verdict() -> None:
    pool = make_judge("math_verify", {}, workers=2, deadline_s=1.0)
    hostile = {40: "9^{9^{9^{9}}}", 200: "(10^{8})!"}

    async def judge_all() -> list[Verdict | BaseException]:
        texts = [f"\\boxed{{{hostile.get(i, i % 10)}}}" for i in range(256)]
        judgements = (pool.judge(a_task(i), text, ()) for i, text in enumerate(texts))
        return await asyncio.gather(*judgements, return_exceptions=True)

    verdicts = asyncio.run(judge_all())
    pool.close()
    for i, verdict in enumerate(verdicts):
        if i in hostile:
            assert isinstance(verdict, JudgeError) and f"task t/{i}: the rule 'math_verify' took longer" in str(verdict)
        else:
            assert isinstance(verdict, Verdict) and verdict.solved is (i % 10 == 5)
