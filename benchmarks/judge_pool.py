"""How fast the judge pool is, and how free it leaves the event loop.

    python -m benchmarks.judge_pool [--answers 256] [--workers 1,2] [--rule math_verify] [--hostile 2] [--deadline 1]

For each number of workers, judges geometry answers all at once while a second task of the same event loop wakes up
every millisecond and notes how late it is: that is what a training loop would feel. `inline` is the same rule without a
pool. Then the same with answers that never end among them. The workers are started before the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import statistics
import time
from collections.abc import Sequence

from npu_vlrl.types import JudgeError, Message, Task, Verdict
from npu_vlrl.workflow.rewards import RULES, InlineJudge, JudgePool

PERIOD_S = 0.001
HOSTILE = ("9^{9^{9^{9}}}", "(2^{100000})!", "(" * 300 + "5" + ")" * 300)


def answers(count: int, hostile: int) -> list[tuple[Task, str]]:
    """Right and wrong answers in turns, with `hostile` ones spread evenly among them."""
    golds = ("\\frac{1}{2}", "5\\sqrt{3}", "120^\\circ", "13", "\\frac{36}{13}")
    tasks = [Task(f"t/{i}", (Message("user", ("Find x.",)),), golds[i % 5], "benchmark") for i in range(count)]
    texts = [golds[i % 5] if i % 2 else golds[(i + 1) % 5] for i in range(count)]
    for k in range(hostile):
        texts[(2 * k + 1) * count // (2 * hostile)] = HOSTILE[k % len(HOSTILE)]
    return [
        (t, f"<think>{'I look at the angle. ' * 40}</think>\\boxed{{{text}}}")
        for t, text in zip(tasks, texts, strict=True)
    ]


async def measure(judge: JudgePool | InlineJudge, asked: Sequence[tuple[Task, str]]) -> tuple[float, list[float], int]:
    """Seconds for all answers, how late each tick of the loop was in seconds, and how many had no verdict in time."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(PERIOD_S)
            late.append(time.perf_counter() - before - PERIOD_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    late.clear()
    start = time.perf_counter()
    judgements = (judge.judge(task, text, ()) for task, text in asked)
    results = await asyncio.gather(*judgements, return_exceptions=True)
    seconds = time.perf_counter() - start
    await asyncio.sleep(2 * PERIOD_S)
    ticking.cancel()
    for result in results:
        if not isinstance(result, Verdict | JudgeError):
            raise result
    return seconds, late, sum(isinstance(result, JudgeError) for result in results)


def report(name: str, judge: JudgePool | InlineJudge, asked: Sequence[tuple[Task, str]]) -> None:
    seconds, late, stopped = asyncio.run(measure(judge, asked))
    print(
        f"{name:20} {len(asked)} answers in {seconds:.2f} s ({len(asked) / seconds:.0f} a second), {stopped} stopped; "
        f"event loop late by {1e3 * statistics.median(late):.2f} ms (median), {1e3 * max(late):.1f} ms (largest)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rule", default="math_verify", choices=["math_verify", "geometry3k"])
    parser.add_argument("--hostile", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=1.0)
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, rule {given.rule}, deadline {given.deadline:g} s")
    module = importlib.import_module(RULES[given.rule])
    report("inline", InlineJudge(module.score, module.check_gold), answers(given.answers, 0))
    for workers in map(int, given.workers.split(",")):
        pool = JudgePool(given.rule, {}, workers, given.deadline)
        asyncio.run(measure(pool, answers(64 * workers, 0)))  # starts the workers
        report(f"{workers} workers", pool, answers(given.answers, 0))
        report(f"{workers} workers, {given.hostile} hostile", pool, answers(given.answers, given.hostile))
        pool.close()


if __name__ == "__main__":
    main()
