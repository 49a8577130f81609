"""A few supervised steps on scripted demonstrations, so that RL begins with a model that knows the format."""

from __future__ import annotations

import asyncio
import random
import time

from npu_vlrl.build import task_source
from npu_vlrl.data.source import TaskSource
from npu_vlrl.learner.state import export_model
from npu_vlrl.model.load import replace_weights
from npu_vlrl.rollout.demonstrations import ScriptedSession, script
from npu_vlrl.run import Run
from npu_vlrl.types import Trajectory
from npu_vlrl.workflow.export import export
from npu_vlrl.workflow.vision_multiturn import Sampling

FOLDER = "warm_start"
SEED = 2_000_003
"""Added to `train.seed`, so that the demonstrated tasks are neither trained nor evaluated on."""


async def warm_start(run: Run) -> None:
    """Trains on the demonstrations and keeps the result in the run folder, where a resumed run finds it."""
    config, loaded = run.config, run.parts.loaded
    if not config.warm_start.steps:
        return
    target = run.folder.path / FOLDER
    if (target / "config.json").is_file():
        replace_weights(loaded.policy, target)
        return
    began = time.monotonic()
    tasks = task_source(config.data.train, config.train.seed + SEED, config.model.path)
    learner = run.new_learner()
    loss, right = 0.0, 0
    for step in range(config.warm_start.steps):
        played = await _demonstrate(run, tasks, step)
        right += sum(trajectory.solved_first_try for trajectory in played)
        loss = learner.supervise(export(played, "concat", "best", 1.0, str(loaded.folder)), config.warm_start.lr)
    export_model(loaded.policy, loaded.tokenizer, loaded.folder, target)
    learner.forget_features()
    share = right / (config.warm_start.steps * config.warm_start.batch)
    run.console.line(
        f"warm start: {config.warm_start.steps} supervised steps on scripted demonstrations, of whose first answers "
        f"{share:.0%} are right; last loss {loss:.3f} nats a token, {time.monotonic() - began:.0f} s"
    )


async def _demonstrate(run: Run, tasks: TaskSource, step: int) -> list[Trajectory]:
    config, loaded = run.config, run.parts.loaded
    end = loaded.policy.special.end_of_turn[0]
    rng = random.Random(f"warm start/{config.train.seed}/{step}")
    episodes = []
    for member, task in enumerate(tasks.next(config.warm_start.batch)):
        lines = script(task, config.warm_start.right_share, rng, tries=config.workflow.max_turns - 1)
        session = ScriptedSession(lines, loaded.tokenizer, end)
        episodes.append(run.parts.workflow.run(task, session, f"warm{step}", member, Sampling()))
    return list(await asyncio.gather(*episodes))
