"""Debug runs of one half of a training: rollouts without learning, and learning from recorded rollouts."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from npu_vlrl.config import Config, ConfigError
from npu_vlrl.model.load import replace_weights
from npu_vlrl.network.world import is_engine, started_processes
from npu_vlrl.report.metrics import rollout_metrics
from npu_vlrl.report.recorded import Recorded
from npu_vlrl.rollout.collect import Rollout, has_failed
from npu_vlrl.train_loop import learn
from npu_vlrl.training.processes import run_engine
from npu_vlrl.training.run import Run
from npu_vlrl.training.warm_start import FOLDER


def rollout_only(config: Config) -> None:
    """Plays the groups of each step and records them, without a learner and with constant weights.

    Raises ConfigError for settings that need a learner.
    """
    if config.warm_start.steps or config.train.staleness:
        key = "warm_start.steps" if config.warm_start.steps else "train.staleness"
        raise ConfigError(f"--debug-rollout-only learns nothing; set {key}=0")
    if is_engine():
        run_engine(config)
        return
    with ExitStack() as cleanup:
        asyncio.run(_play(Run(config, cleanup)))


async def _play(run: Run) -> None:
    for step in range(run.config.train.steps):
        began = time.monotonic()
        run.parts.engine.weights_changed(0)  # or it would sleep from the first rollout on
        rollout = await run.rollout(step)
        failed = [trajectory for group in rollout.failed for trajectory in group]
        run.folder.trajectories(step, [*rollout.trajectories, *failed], {})
        samples = run.export(rollout.trajectories)
        metrics = rollout_metrics(rollout.trajectories, samples, run.config.workflow) | rollout.metrics
        metrics["rollout_seconds"] = time.monotonic() - began
        run.folder.metrics(step, metrics)
        for message in (*rollout.errors, *rollout.judgements.messages()):
            run.console.line(f"step {step}: {message}")
        run.console.step(step, metrics)


def train_only(config: Config, recorded: Path) -> None:
    """Learns from the trajectories that a run recorded: its tokens, logprobs, rewards and images; nothing is sampled.

    With the configuration of that run each step has the metrics that it had there. It begins with the same weights: a
    warm start is taken from that run's folder. No checkpoint or model is written.

    Raises ConfigError when there is nothing to learn from, and what `Recorded` raises.
    """
    recorded = recorded.absolute()
    if started_processes() > 1:
        raise ConfigError("--debug-train-only learns in one process; start it without torchrun")
    alone: dict[str, Any] = {
        "rollout": config.rollout.model_copy(update={"engine": "inprocess", "tensor_parallel": 1, "sleep": False}),
        "train": config.train.model_copy(update={"learners": 1, "shard": False, "offload": False, "staleness": 0}),
    }
    with ExitStack() as cleanup:
        _learn_recorded(Run(config.model_copy(update=alone), cleanup, draws=False), recorded)


def _learn_recorded(run: Run, recorded: Path) -> None:
    policy = run.parts.loaded.policy
    if (recorded / FOLDER / "config.json").is_file():
        replace_weights(policy, recorded / FOLDER)
    learner = run.new_learner()
    learned = 0
    for step, groups in Recorded(recorded, policy.special, policy.merge_size).steps():
        if step >= run.config.train.steps:
            break
        began = time.monotonic()
        whole, failed = ([g for g in groups if has_failed(g) is bad] for bad in (False, True))
        rollout = Rollout(whole, failed)
        for group in groups:
            rollout.judgements.add(group)
        samples, metrics = learn(run, learner, step, rollout)
        run.parts.vision.weights_changed()
        metrics["seconds"] = time.monotonic() - began
        run.report(step, rollout, samples, metrics, learner)
        learned += 1
    if not learned:
        raise ConfigError(
            f"--debug-train-only: {recorded} has no recorded step below train.steps={run.config.train.steps}; record "
            "one with run.record_every=1, or ask for more steps"
        )
