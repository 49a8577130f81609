"""A few supervised steps on scripted demonstrations, so that RL begins with a model that knows the format."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable

from npu_vlrl.common.registry import GENERATORS, load
from npu_vlrl.data.source import TaskSource
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.load import replace_weights
from npu_vlrl.rollout.demonstrations import ScriptedSession, played
from npu_vlrl.training.build import task_source
from npu_vlrl.training.run import Run
from npu_vlrl.types import DataError, Sample, Task, Trajectory
from npu_vlrl.workflow.base import Sampling
from npu_vlrl.workflow.environments import GameEnvironment
from npu_vlrl.workflow.export import export
from npu_vlrl.workflow.tools.forms import FORMS

FOLDER = "warm_start"
SEED = 2_000_003
"""Offset of `train.seed` for demonstrated tasks, so that none is trained or evaluated on."""


async def warm_start(run: Run, between: Callable[[str], None] = lambda _: None) -> None:
    """Trains on the demonstrations and keeps the result in the run folder, where a resumed run finds it. `between`
    steps may end it by raising.
    """
    config, loaded = run.config, run.parts.loaded
    if not config.warm_start.steps:
        return
    target = run.folder.path / FOLDER
    if (target / "config.json").is_file():
        replace_weights(loaded.policy, target)
        return
    began = time.monotonic()
    tasks = task_source(config.data.train, config, config.train.seed + SEED)
    learner = run.new_learner()
    loss, right, solved = 0.0, 0, 0
    for step in range(config.warm_start.steps):
        between("the warm start")
        shown = await _demonstrate(run, tasks, step)
        right += sum(trajectory.solved_first_try for trajectory in shown)
        solved += sum(trajectory.solved for trajectory in shown)
        loss = learner.supervise(demonstrated_samples(shown, str(loaded.folder)), config.warm_start.lr)
    export_model(loaded, target)
    run.inputs.record_warm_start()
    learner.forget_features()
    episodes = config.warm_start.steps * config.warm_start.batch
    if not config.environment.is_judged:
        known = f"of which {solved / episodes:.0%} solve their game"
    else:
        known = f"of whose first answers {right / episodes:.0%} are right"
    run.console.line(
        f"warm start: {config.warm_start.steps} supervised steps on scripted demonstrations, {known}; "
        f"last loss {loss:.3f} nats a token, {time.monotonic() - began:.0f} s"
    )


async def _demonstrate(run: Run, tasks: TaskSource, step: int) -> list[Trajectory]:
    config, loaded = run.config, run.parts.loaded
    ends = loaded.policy.special.end_of_turn
    rng = random.Random(f"warm start/{config.train.seed}/{step}")
    episodes = []
    for member, task in enumerate(tasks.next(config.warm_start.batch)):
        session = ScriptedSession(_lines(run, task, rng), loaded.tokenizer, ends)
        episodes.append(run.parts.workflow.run(task, session, f"warm{step}", member, Sampling()))
    shown = list(await asyncio.gather(*episodes))
    for trajectory in shown:
        if trajectory.error is not None:
            raise DataError(f"warm_start: the demonstration of {trajectory.error}")
    return shown


def demonstrated_samples(shown: list[Trajectory], template: str) -> list[Sample]:
    """Samples of demonstrations: one of each episode, or of each turn where the chat template rewrites history."""
    rewritten = any(trajectory.rewritten_turn() is not None for trajectory in shown)
    return export(shown, "individual" if rewritten else "concat", "best", 1.0, template)


def _lines(run: Run, task: Task, rng: random.Random) -> Iterable[str]:
    config, episodes = run.config, run.parts.episodes
    environment, opened = episodes.new_environment(), episodes.renderer.opens_thought
    if isinstance(environment, GameEnvironment):
        own = random.Random(rng.random())  # episodes are played at the same time, and must not share a stream
        share = config.warm_start.right_share
        return played(environment.game, task.extra["seed"], config.environment, share, own, opened)
    assert config.data.train.generator is not None, "the configuration demands one"
    form = FORMS[run.parts.loaded.policy.family.chat.tool_calls]
    shown = load(GENERATORS, config.data.train.generator).demonstration
    lines: Iterable[str] = shown(task, config, rng, opened, form)
    return lines
