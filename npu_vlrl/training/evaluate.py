"""The command `npu-vlrl eval`, which plays the evaluation tasks without learning."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import ExitStack
from pathlib import Path

from npu_vlrl.cluster import check_started
from npu_vlrl.config import Config, ConfigError
from npu_vlrl.hardware import software
from npu_vlrl.network.interrupt import Interrupted
from npu_vlrl.network.world import is_engine
from npu_vlrl.report import evaluated, tables
from npu_vlrl.report.lines import read_lines
from npu_vlrl.training.evaluation import Evaluation
from npu_vlrl.training.processes import run_engine
from npu_vlrl.training.run import Run


def evaluate(config: Config) -> dict[str, float]:
    """Plays the evaluation tasks with the model as it is; returns the means over all tasks.

    Each batch of episodes is recorded as it ends, and a resumed evaluation plays the missing ones: its results equal
    those of an evaluation without a stop. With several processes, rank 0 does this; the others sample for it and return
    an empty mapping.

    Raises ConfigError when `run.dir` holds a run that is not this evaluation.
    """
    check_started(config)
    if is_engine():
        run_engine(config)
        return {}
    with ExitStack() as cleanup:
        run = Run(config, cleanup, draws=False)
        evaluation = Evaluation(config, run.parts, "evaluation0")
        folder = run.folder.path
        _remove_metrics(folder / "metrics.jsonl")
        evaluation.resume(folder / "trajectories.jsonl")
        if evaluation.results:
            run.console.line(f"{len(evaluation.results)} of {len(run.parts.eval_tasks)} tasks were answered before")
        try:
            asyncio.run(_play_missing(run, evaluation))
        except KeyboardInterrupt:
            raise Interrupted("ended by Ctrl-C; what was answered is kept: go on with run.if_exists=resume") from None
        run.evaluations["evaluation"] = found = run.record(evaluation, 0)
        settings = {
            "model": config.model.path,
            "answers": config.evaluation.answers,
            **dataclasses.asdict(run.parts.eval_sampling),
        }
        values = evaluated.write(folder, settings, run.parts.eval_skipped, evaluation.results)
        platform = run.parts.platform
        run.folder.summary({**run.evaluations, "platform": platform.name, "versions": software.versions(platform)})
        run.console.console.print(*tables.evaluation(values))
        run.console.line(f"run folder: {folder.resolve()}")
        return found


async def _play_missing(run: Run, evaluation: Evaluation) -> None:
    while evaluation.missing:
        run.parts.engine.forget_features()  # results of a batch must not depend on earlier batches
        run.folder.trajectories(0, await evaluation.play(), {})


def _remove_metrics(file: Path) -> None:
    """Removes the metrics of an evaluation that is resumed. Raises ConfigError when they are those of a training."""
    if not file.is_file():
        return
    for line in read_lines(file):
        if any(key != "step" and not key.startswith("eval/") for key in line):
            raise ConfigError(f"run.dir: {file.parent} holds a training; choose another run.dir for the evaluation")
    file.unlink()
