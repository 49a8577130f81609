"""Evaluation: rollouts without learning, in batches that can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from npu_vlrl.config import Config, ConfigError
from npu_vlrl.report.record_schema import read_record
from npu_vlrl.report.results import TaskResult, task_result
from npu_vlrl.report.run_folder import trajectory_record
from npu_vlrl.rollout.collect import play
from npu_vlrl.rollout.judgements import Judgements
from npu_vlrl.training.build import Parts
from npu_vlrl.types import Task, Trajectory

BATCH = 256
"""Number of episodes that are played at once."""


@dataclass(frozen=True)
class Batch:
    """Tasks that are played at once."""

    prefix: str
    tasks: Sequence[Task]
    answers: int

    def ids(self) -> list[str]:
        """Ids of the batch's trajectories, in the order of their records."""
        groups = [f"{self.prefix}/{index}/{task.id}" for index, task in enumerate(self.tasks)]
        return [f"{group}/{member}" for group in groups for member in range(self.answers)]


class Evaluation:
    """Plays `evaluation.answers` episodes of each evaluation task, and counts them.

    Example: `evaluation = Evaluation(config, parts, "baseline0")`, then `await evaluation.play()` while `missing`.
    """

    def __init__(self, config: Config, parts: Parts, prefix: str) -> None:
        self._config, self._parts = config, parts
        answers = config.evaluation.answers
        size = max(1, BATCH // answers)
        tasks = parts.eval_tasks
        self.missing = [
            Batch(f"{prefix}.{start}", tasks[start : start + size], answers) for start in range(0, len(tasks), size)
        ]
        """Batches that were not played yet, in order."""
        self.results: list[TaskResult] = []
        self.errors: list[str] = []
        """Reasons for which samples could not be used."""
        self.judgements = Judgements()
        self._name = prefix

    async def play(self) -> list[Trajectory]:
        """Plays the next batch, and counts it; a failed sample counts as wrong.

        Raises RolloutError when more than `rollout.max_failed_share` of the judgements so far failed.
        """
        parts, batch = self._parts, self.missing.pop(0)
        groups = await play(batch.tasks, parts.workflow, parts.engine, batch.answers, parts.eval_sampling, batch.prefix)
        played = [trajectory for group in groups for trajectory in group]
        self._count(batch, [trajectory_record(trajectory, {}) for trajectory in played])
        self.judgements.check(self._config.rollout.max_failed_share, self._name)
        return played

    def resume(self, file: Path) -> None:
        """Counts the complete batches in `file` instead of playing them, and truncates the file behind them.

        The content of a batch affects the last bits of the model's results, so an incomplete one is played again.
        Raises ConfigError when the file has records of other tasks.
        """
        if not file.is_file():
            return
        kept = 0
        with file.open("rb") as lines:
            while self.missing:
                batch = self.missing[0]
                ids = batch.ids()
                found = list(islice(lines, len(ids)))
                # a line without its end was cut by a crash
                records = [self._read(file, line) for line in found if line.endswith(b"\n")]
                self._check(file, batch, ids, records)
                if len(records) < len(ids):
                    break
                try:
                    self._count(batch, records)
                except (KeyError, TypeError, AttributeError) as error:
                    raise ConfigError(
                        f"run.dir: {file} holds a record without what an evaluation writes ({error!r}); choose another "
                        "run.dir"
                    ) from error
                del self.missing[0]
                kept += sum(map(len, found))
            if not self.missing and lines.readline():
                raise ConfigError(f"run.dir: {file} holds more than these tasks; choose another run.dir")
        with file.open("r+b") as whole:
            whole.truncate(kept)

    def _read(self, file: Path, line: bytes) -> dict[str, Any]:
        try:
            return read_record(line)
        except ValueError as error:
            raise ConfigError(
                f"run.dir: {file} holds a line that is no record ({error}); choose another run.dir"
            ) from error

    def _check(self, file: Path, batch: Batch, ids: list[str], records: list[dict[str, Any]]) -> None:
        for index, (name, record) in enumerate(zip(ids, records, strict=False)):
            if (record["id"], record.get("answer")) != (name, batch.tasks[index // batch.answers].answer):
                raise ConfigError(
                    f"run.dir: {file} holds {record['id']} where this evaluation has {name}, or its answer is another; "
                    "the folder is another run's, or the data have changed: choose another run.dir"
                )

    def _count(self, batch: Batch, records: list[dict[str, Any]]) -> None:
        workflow, processor, n = self._config.workflow, self._parts.loaded.processor, batch.answers
        patch = processor.patch_size if processor is not None else 0
        for index, task in enumerate(batch.tasks):
            own = records[index * n : (index + 1) * n]
            self.results.append(task_result(task, own, workflow.reward_mode, workflow.turn_discount, patch))
        self.errors += [record["error"] for record in records if record["error"] is not None]
        for record in records:
            for turn in record["turns"]:
                verdict = turn["verdict"]
                checks = (verdict or {}).get("checks", {})
                self.judgements.count(record["task"], verdict is not None, turn["judge_error"], checks)
