"""One process of a test of engines that wait for nobody: `python -m tests.engines.async_actor FOLDER`.

Rank 0 plays episodes of a tiny Qwen2.5-VL on the other ranks' engines, and brings them new weights in the middle.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from npu_vlrl.engines import remote
from npu_vlrl.engines.asynchronous import AsyncEngine
from npu_vlrl.engines.base import EngineError, Outcome, Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.engines.serve import HandlerFactory, serve, weights_by_transfer
from npu_vlrl.hardware import select
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.network.world import PeerError, World, join
from npu_vlrl.rollout.collect import play
from npu_vlrl.types import Trajectory
from npu_vlrl.workflow.base import Sampling
from npu_vlrl.workflow.export import export
from tests.support.episodes import Reply, Stage, an_image, task
from tests.support.models import load
from tests.support.rounds import params, prompt
from tests.support.scoring import learner_logprobs

UPDATES = 3
BROKEN = 50
"""A version with which engine 1 fails every round."""

TASKS = [
    task("a", [an_image(60, 100, 1), "what?"], Reply("no"), Reply("look again")),
    task("b", ["no picture"], Reply("wrong")),
    task("c", [an_image(28, 28, 3), "x"], Reply("no")),
    task("d", ["up?"]),
]


class WaitsToBeInterrupted(InProcessEngine):
    """Until the last update it decodes no more than two steps of a round before a message comes."""

    rank: int

    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        if self.weight_version == BROKEN and self.rank == 1:
            return [MemoryError("no room")] * len(requests)
        waiting, asked = self.interrupted, 0

        def patient() -> bool:
            nonlocal asked
            asked += 1
            while asked > 2 and self.weight_version < UPDATES and not waiting():
                time.sleep(0.001)
            return waiting()

        self.interrupted = patient
        try:
            return super().sample(requests)
        finally:
            self.interrupted = waiting


def gaps(stage: Stage, weights: list[dict[str, Any]], played: Sequence[Trajectory]) -> list[tuple[int, float, float]]:
    """For each token its version, and how far its logprob is from the learner's, with that version and the one before
    it (or after it, for the first).
    """
    samples = export(played, "concat", "best", 1.0, "")
    ours = []
    for version in weights:
        with torch.no_grad():
            for name, tensor in stage.policy.trainable().items():
                tensor.copy_(version[name])
        stage.vision.weights_changed()
        ours.append(learner_logprobs(stage.policy, stage.vision, samples))
    found = []
    for sample in samples:
        for i, (version, said) in enumerate(zip(sample.weight_versions, sample.behaviour_logprobs, strict=True)):
            right, wrong = (abs(float(ours[v][sample.id][i]) - said) for v in (version, abs(version - 1)))
            found.append((version, right, wrong))
    return found


async def learner(stage: Stage, engine: AsyncEngine) -> dict[str, Any]:
    idle = engine.session()  # an episode whose judge takes for ever
    engine.weights_changed(0)
    weights = [copy(stage)]
    job = asyncio.create_task(play(TASKS, stage.workflow(12), engine, 2, Sampling(), "free"))
    for version in range(1, UPDATES + 1):
        await asyncio.sleep(0.3)
        change(stage)
        weights.append(copy(stage))
        report = await engine.update(version)
        assert report["sync/bytes"] > 0
    played = [trajectory for group in await job for trajectory in group]
    seen: dict[str, Any] = {
        "errors": [trajectory.error for trajectory in played],
        "versions": [[turn.action.weight_versions for turn in trajectory.turns] for trajectory in played],
        "gaps": gaps(stage, weights, played),
        "counts": vars(engine.counts),
        "left": [len(engine._homes), len(engine._playing), sorted(engine._open)],
    }
    idle.close()
    await engine.update(BROKEN)
    session, other = engine.session(), engine.session()
    answers = await asyncio.gather(
        session.generate(prompt(stage, "up?"), params(1)),
        other.generate(prompt(stage, "down?"), params(2)),
        return_exceptions=True,
    )
    seen["broken"] = [[type(one).__name__, str(one)] for one in answers]
    await engine.update(BROKEN + 1)
    seen["works again"] = len((await session.generate(prompt(stage, "up?"), params(1))).token_ids)
    try:
        await engine.update(BROKEN)
    except ValueError as error:
        seen["falls"] = str(error)
    return seen


def copy(stage: Stage) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in stage.policy.trainable().items()}


@torch.no_grad()
def change(stage: Stage) -> None:
    for parameter in stage.policy.trainable().values():
        parameter.mul_(1.05)


def lead(world: World, folder: Path) -> None:
    stage = Stage(load(folder / "model"))
    remote.begin(world, folder / "model")
    try:
        engine = AsyncEngine(world, stage.policy.trainable(), 2**16)
        (folder / "seen.json").write_text(json.dumps(asyncio.run(learner(stage, engine))))
    except (EngineError, PeerError) as error:
        print(error)
        raise
    finally:
        remote.stop(world)


def follow(world: World) -> None:
    def start(scratch: Path) -> tuple[InProcessEngine, HandlerFactory]:
        loaded = load(scratch)
        made = WaitsToBeInterrupted(loaded.policy, VisionFeatures(loaded.policy, loaded.processor, 2**26))
        made.rank = world.rank
        return made, weights_by_transfer

    serve(world, start)


if __name__ == "__main__":
    torch.set_num_threads(1)
    joined = join(select(), 60.0)
    follow(joined) if joined.rank else lead(joined, Path(sys.argv[1]))
