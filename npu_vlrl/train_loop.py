"""The training loop, one screen long."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from npu_vlrl.cluster import check_started
from npu_vlrl.config import Config
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.network.interrupt import CtrlC, Interrupted
from npu_vlrl.network.world import is_engine
from npu_vlrl.rollout.collect import Rollout
from npu_vlrl.training.processes import run_engine
from npu_vlrl.training.run import Run
from npu_vlrl.training.warm_start import warm_start
from npu_vlrl.types import Sample


def train(config: Config) -> dict[str, Any]:
    """Runs a whole training and returns its summary, which is also in `summary.json`.

    With several processes, as torchrun starts them, rank 0 runs the loop. The others learn with it or sample for it
    (`train.learners`), and return an empty mapping.

    Raises ConfigError and DataError for what cannot be trained, and Interrupted after the first Ctrl-C, with a
    checkpoint if a step was done; a second one ends the process.
    """
    check_started(config)
    if is_engine():
        run_engine(config)
        return {}
    with ExitStack() as cleanup:
        run, ctrl_c = Run(config, cleanup), CtrlC()
        with ctrl_c.caught():
            return asyncio.run(_train(run, ctrl_c))


async def _train(run: Run, ctrl_c: CtrlC) -> dict[str, Any]:
    config, engine = run.config, run.parts.engine

    engine.sleep()  # until there is something to sample
    await warm_start(run, ctrl_c.check)
    learner = run.new_learner()
    start = run.resume(learner)
    guard = run.guard(learner)
    await engine.update(start, guard)  # what the warm start or a checkpoint brought
    learner.forget_features()  # of the guard's images: a checkpoint holds no features, and a resumed run begins alike
    engine.forget_features()
    if start == 0:
        run.evaluations["baseline"] = await run.evaluate("baseline", 0, ctrl_c.check)

    end = False
    async with run.rollouts(start) as rollouts:
        for step in range(start, config.train.steps):
            # before the step, not after it: a run that is resumed from the checkpoint of this step evaluates again
            if step and config.evaluation.every and step % config.evaluation.every == 0:
                try:
                    await run.evaluate("evaluation", step, ctrl_c.check)
                except Interrupted:
                    await rollouts.beside(partial(run.save, step, learner, rollouts.state()))
                    raise
            step_began = time.monotonic()
            rollout = await rollouts.take(step)
            rolled_out = time.monotonic()
            samples, metrics = await rollouts.beside(partial(learn, run, learner, step, rollout))
            metrics |= rollout.metrics | await rollouts.update(step + 1, guard)
            metrics |= {"rollout_seconds": rolled_out - step_began, "seconds": time.monotonic() - step_began}
            run.report(step, rollout, samples, metrics, learner)
            done, every = step + 1, config.run.checkpoint_every
            end = ctrl_c.asked and done < config.train.steps
            if end or (done < config.train.steps and every and done % every == 0):
                await rollouts.beside(partial(run.save, done, learner, rollouts.state()))
            if end:
                break
    if end:
        raise ctrl_c.ended(f"after {done} steps")

    run.save(config.train.steps, learner, rollouts.state())  # before the evaluation, which a resumed run repeats
    run.evaluations["final"] = await run.evaluate("final", config.train.steps, ctrl_c.check)
    return run.finish()


def learn(run: Run, learner: LearnerGroup, step: int, rollout: Rollout) -> tuple[list[Sample], dict[str, float]]:
    """Trains on the groups of a step; returns the samples with their advantages, and metrics."""
    chosen = run.algorithm.selection.select(run.export(rollout.trajectories))
    samples, metrics = run.algorithm.with_credit(learner.score(chosen))
    metrics |= run.group_rewards.metrics(rollout.trajectories)
    return samples, learner.step(samples, step, note=run.records(step)) | metrics
