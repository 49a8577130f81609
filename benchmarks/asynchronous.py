"""What it brings to play while the learner learns: the real schedule and engine rounds, with simulated times.

    python -m benchmarks.asynchronous [--staleness 0,1,2] [--steps 20] [--groups 8] [--members 4] [--engines 2]
        [--learn 0.6] [--token-ms 0.5] [--tokens 100] [--spread 0.8] [--judge 0.05] [--seeds 3]

An engine process decodes all turns of a round at once, a token in `token-ms`, so a round takes as long as its longest
turn. The tokens of a turn are lognormal with a median of `tokens` and a sigma of `spread`, at most ten medians; an
episode has three turns, and after each the judge thinks for `judge` seconds (median, the same sigma). An update takes
`learn` seconds. Staleness 0 is the synchronous loop, whose rounds wait for all episodes. The same work for each
staleness and seed; nothing but the clock is simulated with sleeps. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from npu_vlrl.data.source import TaskSource
from npu_vlrl.engines.asynchronous import AsyncEngine
from npu_vlrl.engines.base import EngineCounts, Outcome, Request
from npu_vlrl.engines.remote import Link, RemoteEngine
from npu_vlrl.rollout.collect import Rollout, collect
from npu_vlrl.rollout.schedule import Schedule
from npu_vlrl.rollout.stream import Episodes, InTurn, Stream
from npu_vlrl.types import (
    EngineSession,
    EpisodeStatus,
    Generation,
    Message,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
    Task,
    Trajectory,
)
from npu_vlrl.workflow.base import Sampling

TURNS = 3
MOST = 10
"""Medians, of a turn."""
SPECIAL = SpecialTokens(end_of_turn=(0,))


class Times:
    """What takes how long; the same for a seed, whoever asks in whichever order."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed = options, seed

    def tokens(self, key: object) -> int:
        median = self.options.tokens
        return max(1, round(min(MOST, self._factor("tokens", key)) * median))

    def judge_s(self, key: object) -> float:
        return self.options.judge * self._factor("judge", key)

    def _factor(self, *key: object) -> float:
        return random.Random(f"{self.seed}/{key}").lognormvariate(0, self.options.spread)


class SimulatedLink:
    """An engine process whose steps of decoding are sleeps."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.counts = EngineCounts()
        self.interrupted = 0
        self._left: dict[int, int] = {}
        """Tokens of a turn that was interrupted, by session."""
        self._paused = asyncio.Event()

    async def ask(self, requests: Sequence[Request]) -> list[Outcome]:
        left = [self._left.pop(r.session, 0) or self.times.tokens(r.sampling.seed) for r in requests]
        token_s = self.times.options.token_ms / 1000
        self._paused.clear()
        began = time.perf_counter()
        try:
            await asyncio.wait_for(self._paused.wait(), max(left) * token_s)
            drawn = int((time.perf_counter() - began) / token_s)
        except TimeoutError:
            drawn = max(left)
        outcomes: list[Outcome] = []
        for request, n in zip(requests, left, strict=True):
            stop = StopReason.END_OF_TURN
            if drawn < n:
                stop, self._left[request.session] = StopReason.INTERRUPTED, n - drawn
                self.interrupted += 1
            made = min(drawn, n)
            outcomes.append(Generation((1,) * made, (0.0,) * made, (0,) * made, stop))
        return outcomes

    async def pause(self) -> None:
        self._paused.set()

    def forget_session(self, number: int) -> None:
        """It keeps nothing of it."""


class SimulatedEpisodes:
    """In the place of a workflow."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.prompt = [Segment(SegmentKind.PROMPT, (5, 6, 7), SPECIAL)]

    async def run(self, task: Task, session: EngineSession, group: str, member: int, sampling: Sampling) -> Trajectory:
        for turn in range(TURNS):
            # by the task, and not by the name of its group, so that each staleness has the same work
            params = sampling.for_turn(task.id, member, turn, 10**6)
            await session.generate(self.prompt, params)
            await asyncio.sleep(self.times.judge_s(params.seed))
        session.close()
        return Trajectory(task, group, member, (), EpisodeStatus.SOLVED)


def simulated(kind: type[RemoteEngine], links: list[SimulatedLink]) -> RemoteEngine:
    """The real engine of a learner, with simulated processes; new weights take no time."""

    class Simulated(kind):  # type: ignore[valid-type,misc]
        def weights_changed(self, version: int) -> dict[str, float]:
            self.weight_version = version
            return {}

    world = SimpleNamespace(size=1, engines=(), timeout_s=1.0, start_timeout_s=1.0, enter_thread=lambda: None)
    engine = cast(RemoteEngine, Simulated(world, {}, 1))
    engine.links = cast(list[Link], links)
    engine._places = list(engine.links)
    return engine


async def measure(options: argparse.Namespace, staleness: int, seed: int) -> dict[str, float]:
    """Trains `steps` steps; returns seconds a step and what the stream says of itself."""
    times = Times(options, seed)
    links = [SimulatedLink(times) for _ in range(options.engines)]
    engine = simulated(AsyncEngine if staleness else RemoteEngine, links)
    source = TaskSource.generated(lambda i: Task(f"t{i}", (Message("user", ("x",)),), None, "simulated"))
    workflow = cast(Any, SimulatedEpisodes(times))

    async def in_turn(step: int) -> Rollout:
        played = workflow, engine, options.members, Sampling(), f"step{step}"
        return await collect(source.next, options.groups, *played, 0.0, lambda group: True)

    rollouts: InTurn | Stream
    if staleness:
        episodes = Episodes(workflow, engine, options.members, Sampling(), 0.0, lambda group: True)
        rollouts = Stream(episodes, source, Schedule(options.groups, staleness, options.steps))
    else:
        rollouts = InTurn(in_turn, source, engine)
    trained: list[str] = []
    mean_staleness: list[float] = []
    began, waited = time.perf_counter(), 0.0
    async with rollouts:
        for step in range(options.steps):
            asked = time.perf_counter()
            rollout = await rollouts.take(step)
            waited += time.perf_counter() - asked
            trained += [group[0].task.id for group in rollout.groups]
            mean_staleness.append(rollout.metrics.get("async/staleness", 0.0))
            await rollouts.beside(lambda: time.sleep(options.learn))
            await rollouts.update(step + 1)
        taken = time.perf_counter() - began
    assert len(set(trained)) == len(trained) == options.steps * options.groups
    return {
        "step_s": taken / options.steps,
        "waited_share": waited / taken,
        "staleness": statistics.mean(mean_staleness),
        "interrupted_turns_a_step": sum(link.interrupted for link in links) / options.steps,
    }


def compare(options: argparse.Namespace) -> list[dict[str, float]]:
    """A row for each staleness: means over the seeds, and the speed-up over the first row."""
    rows: list[dict[str, float]] = []
    for staleness in map(int, options.staleness.split(",")):
        runs = [asyncio.run(measure(options, staleness, seed)) for seed in range(options.seeds)]
        row = {"eta": staleness, **{key: statistics.mean(run[key] for run in runs) for key in runs[0]}}
        rows.append(row | {"speed_up": (rows[0] if rows else row)["step_s"] / row["step_s"]})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.asynchronous")
    parser.add_argument("--staleness", default="0,1,2")
    for name, usual in (("steps", 20), ("groups", 8), ("members", 4), ("engines", 2), ("tokens", 100), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name, value in (("learn", 0.6), ("token-ms", 0.5), ("spread", 0.8), ("judge", 0.05)):
        parser.add_argument(f"--{name}", type=float, default=value)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    rows = compare(options)
    names = list(rows[0])
    print(" | ".join(names), file=sys.stderr)
    for row in rows:
        print(" | ".join(f"{row[name]:.2f}" for name in names), file=sys.stderr)
    print(json.dumps({"cores": os.cpu_count(), **vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
