"""How fast the judge pool is, and how free it leaves the event loop and a training step.

    python -m benchmarks.judge_pool [--answers 256] [--workers 1,2] [--rule math_verify] [--hostile 2] [--deadline 1]

For each number of workers, judges geometry answers all at once while a second task of the same event loop wakes up
every millisecond and notes how late it is: that is what the episodes of a step would feel. Then the same while a thread
takes training steps of a small language model, one after the other, without and with answers that never end. `in place`
is the rule without a pool. The workers are started before the clock. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from npu_vlrl.common.registry import RULES
from npu_vlrl.types import JudgeError, Message, Task, Verdict
from npu_vlrl.workflow.rewards import InlineJudge, JudgePool

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


Judge = JudgePool | InlineJudge


def training_step() -> Callable[[], None]:
    """Forward, backward and AdamW on 4 x 128 tokens of a Qwen2 of 2 layers and width 256, in one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(4096, (4, 128))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


async def measure(judge: Judge, asked: Sequence[tuple[Task, str]], step: Callable[[], None] | None) -> dict[str, Any]:
    """Judges all answers at once beside a ticking task and, unless None, a thread that repeats `step`."""
    late: list[float] = []
    steps: list[float] = []
    judging = True

    async def tick() -> None:
        while judging:
            before = time.perf_counter()
            await asyncio.sleep(PERIOD_S)
            late.append(time.perf_counter() - before - PERIOD_S)

    def train() -> None:
        while judging and step is not None:
            steps.append(seconds_of(step))

    beside = asyncio.gather(tick(), asyncio.to_thread(train))
    await asyncio.sleep(0.05)
    late.clear()
    start = time.perf_counter()
    judgements = (judge.judge(task, text, ()) for task, text in asked)
    results = await asyncio.gather(*judgements, return_exceptions=True)
    seconds = time.perf_counter() - start
    await asyncio.sleep(2 * PERIOD_S)
    judging = False
    await beside
    for result in results:
        if not isinstance(result, Verdict | JudgeError):
            raise result
    return {
        "seconds": round(seconds, 2),
        "stopped": sum(isinstance(result, JudgeError) for result in results),
        "late_median_ms": round(1e3 * statistics.median(late), 2),
        "late_largest_ms": round(1e3 * max(late), 1),
        "step_median_ms": round(1e3 * statistics.median(steps), 1) if steps else None,
    }


def seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rule", default="math_verify", choices=["math_verify", "geometry3k"])
    parser.add_argument("--hostile", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=1.0)
    given = parser.parse_args()
    step = training_step()
    good, mixed = answers(given.answers, 0), answers(given.answers, given.hostile)
    alone = [seconds_of(step) for _ in range(50)][10:]
    module = importlib.import_module(RULES[given.rule])
    cases = {"in place": asyncio.run(measure(InlineJudge(module.score, module.check_gold), good, None))}
    for workers in map(int, given.workers.split(",")):
        pool = JudgePool(given.rule, {}, workers, given.deadline)
        asyncio.run(measure(pool, answers(64 * workers, 0), None))  # starts the workers
        cases[f"workers {workers}"] = asyncio.run(measure(pool, good, None))
        cases[f"workers {workers}, training"] = asyncio.run(measure(pool, good, step))
        cases[f"workers {workers}, training, {given.hostile} hostile"] = asyncio.run(measure(pool, mixed, step))
        pool.close()
    step_alone_ms = round(1e3 * statistics.median(alone), 1)
    print(
        json.dumps({"cores": os.cpu_count(), **vars(given), "step_alone_ms": step_alone_ms, "cases": cases}, indent=1)
    )


if __name__ == "__main__":
    main()
