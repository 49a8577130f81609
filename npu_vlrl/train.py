"""The training loop, one screen long."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Any

from npu_vlrl.config import Config
from npu_vlrl.learner.algorithm import assign_advantages, most_varied
from npu_vlrl.processes import run_engine
from npu_vlrl.run import Run
from npu_vlrl.sync.world import is_engine
from npu_vlrl.warm_start import warm_start


def train(config: Config) -> dict[str, Any]:
    """Runs a whole training and returns its summary, which is also in `summary.json`.

    Of several processes, as torchrun starts them, the first does so; the others learn with it or sample for it
    (`train.learners`), and return nothing.
    """
    if is_engine():
        run_engine(config)
        return {}
    with ExitStack() as cleanup:
        return asyncio.run(_train(Run(config, cleanup)))


async def _train(run: Run) -> dict[str, Any]:
    began = time.monotonic()
    config, engine = run.config, run.parts.engine

    await warm_start(run)
    learner = run.new_learner()
    start = run.resume(learner)
    engine.weights_changed(start)  # what the warm start or a checkpoint brought
    if start == 0:
        run.evaluations["baseline"] = await run.evaluate("baseline", 0)

    for step in range(start, config.train.steps):
        # before the step, not after it: a run that is resumed from the checkpoint of this step evaluates again
        if step and config.evaluation.every and step % config.evaluation.every == 0:
            await run.evaluate("evaluation", step)
        step_began = time.monotonic()
        rollout = await run.rollout(step)
        rolled_out = time.monotonic()
        exported = most_varied(run.export(rollout.trajectories), config.algorithm.keep_groups)
        samples = assign_advantages(learner.score(exported), run.parts.algorithm)
        metrics = learner.step(samples) | engine.weights_changed(step + 1)
        metrics |= {"rollout_seconds": rolled_out - step_began, "seconds": time.monotonic() - step_began}
        run.report(step, rollout, samples, metrics, learner)
        done = step + 1
        if done < config.train.steps and config.run.checkpoint_every and done % config.run.checkpoint_every == 0:
            run.save(done, learner)

    run.evaluations["final"] = await run.evaluate("final", config.train.steps)
    run.save(config.train.steps, learner)
    return run.finish(time.monotonic() - began)
