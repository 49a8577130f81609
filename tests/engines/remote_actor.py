"""One process of a test of remote engines: `python -m tests.engines.remote_actor SCENARIO FOLDER`; writes what it saw.

Rank 0 plays scripted episodes of a tiny Qwen2.5-VL with a frozen tower on the other ranks' engines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from npu_vlrl.engines import remote
from npu_vlrl.engines.base import EngineError, Outcome, Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.engines.serve import HandlerFactory, serve, weights_by_transfer
from npu_vlrl.hardware import select
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.network.world import PeerError, World, join
from npu_vlrl.types import Trajectory
from tests.support.episodes import RecordingEngine, Reply, Stage, an_image, long_episode, task
from tests.support.models import load

TIMEOUT_S = 600.0
"""Longer than a test may take: one that waits for it fails."""
MEMBERS = 2
OUT_OF_MEMORY, KILLED = 6, 7
"""Versions of the weights with which engine 1 ends a round so; engine 2 then goes on."""
Seen = dict[str, Any]

TASKS = [
    *long_episode("qwen2_5_vl"),
    task("d", [an_image(60, 100, 1), "once more"], Reply("no")),
    task("e", ["up?"], Reply("see", (an_image(56, 84, 4),))),
]


class WatchedEngine(remote.RemoteEngine):
    """Notes where each session's turns were played."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.played: dict[int, list[int]] = {}

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = await super().play(requests)
        for request in requests:
            home = self._homes[request.session].channel.peer.rank
            self.played.setdefault(request.session, []).append(home)
        return outcomes


def turns(trajectories: Sequence[Trajectory]) -> list[Any]:
    return [
        [[turn.action.token_ids, turn.action.logprobs, turn.action.weight_versions] for turn in trajectory.turns]
        for trajectory in trajectories
    ]


@torch.no_grad()
def change(stage: Stage) -> None:
    for parameter in stage.policy.trainable().values():
        parameter.mul_(1.1)


def match(stage: Stage, engine: WatchedEngine) -> Seen:
    """The same episodes as on the engine in this process, with changed weights, and what is kept between them."""
    alone = Stage(stage.loaded)
    change(stage)
    seen: Seen = {"sync": engine.weights_changed(3)}
    alone.engine.weights_changed(3)
    seen["remote"], seen["alone"] = (turns(one.play(TASKS, MEMBERS)) for one in (stage, alone))
    seen["homes"] = list(engine.played.values())
    seen["counts"], seen["alone counts"] = asdict(engine.counts), asdict(alone.engine.counts)
    seen["alone images"] = [alone.vision.referenced, alone.vision.encoded]
    encoded = []
    for forget in (False, True):
        if forget:
            engine.forget_features()
        engine.weights_changed(4)
        stage.play(TASKS, MEMBERS, seed=1 + forget)
        encoded.append(engine.counts.images_encoded)
    seen["encoded"] = encoded
    with torch.no_grad():
        stage.policy.text.norm.weight.fill_(torch.nan)
    engine.weights_changed(5)
    seen["not finite"] = [episode.error for episode in stage.play(TASKS[1:3], 1, seed=3)]
    for version in (OUT_OF_MEMORY, KILLED):
        engine.weights_changed(version)
        try:
            stage.play(TASKS, MEMBERS, seed=version)
        except (EngineError, PeerError) as error:
            seen[str(version)] = [type(error).__name__, str(error)]
    return seen


def learner(world: World, folder: Path) -> Seen:
    stage = Stage(load(folder / "model", freeze_vision=True))
    remote.begin(world, folder / "model")
    try:
        engine = WatchedEngine(world, stage.policy.trainable(), 2**14)
        stage.engine, stage.recorder = engine, RecordingEngine(engine)  # type: ignore[assignment,arg-type]
        return match(stage, engine)
    except EngineError as error:
        return {"error": [type(error).__name__, str(error)]}
    finally:
        remote.stop(world)


class BreakingEngine(InProcessEngine):
    """Notes what it keeps, and breaks with the weights of some versions."""

    kept: list[list[int]]
    rank: int

    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        self.kept.append(sorted(self._caches))
        if self.rank == 1 and self.weight_version == OUT_OF_MEMORY:
            self.policy.hidden_continued = out_of_memory  # type: ignore[method-assign]
        if self.weight_version == KILLED:
            note(self.rank, {"kept": self.kept})
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return super().sample(requests)


def out_of_memory(*_: Any) -> Any:
    raise MemoryError("no room for the cache")


def engine(world: World, scenario: str) -> None:
    def start(scratch: Path) -> tuple[InProcessEngine, HandlerFactory]:
        if scenario == "load":
            raise OSError("the disk is full")
        loaded = load(scratch, freeze_vision=True)
        made = BreakingEngine(loaded.policy, VisionFeatures(loaded.policy, loaded.processor, 2**26))
        made.kept, made.rank = [], world.rank
        return made, weights_by_transfer

    serve(world, start)


def note(rank: int, seen: Seen) -> None:
    (Path(sys.argv[2]) / f"rank{rank}.json").write_text(json.dumps(seen))


def main(scenario: str, folder: Path) -> None:
    torch.set_num_threads(1)
    world = join(select(), TIMEOUT_S)
    if world.rank:
        engine(world, scenario)
    else:
        note(world.rank, learner(world, folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
