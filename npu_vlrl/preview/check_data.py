"""Checks the data of a training before it starts, without loading weights: `npu-vlrl data check`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from npu_vlrl.config import Config, SourceConfig
from npu_vlrl.data.source import TaskSource
from npu_vlrl.model.load import load_model
from npu_vlrl.training.build import EpisodeParts, make_setting, task_source
from npu_vlrl.training.processes import config_errors
from npu_vlrl.types import DataError, Task
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow

GENERATED = 100
"""Number of tasks that are checked of a generator, which is endless."""

SHOWN = 20
"""Maximum number of a source's faults that are printed."""


@dataclass
class Found:
    """Content and faults of one source of tasks."""

    name: str
    allowed: float
    """Allowed share of bad rows."""
    usable: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    """Faults by row or task."""
    tokens: list[int] = field(default_factory=list)
    """Number of tokens of each usable task's prompt, its images included."""
    images: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    ids: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    """Number of tasks whose system message `workflow.system_prompt` replaces."""
    unused: Counter[str] = field(default_factory=Counter)
    """Number of rows with a column or field that no task uses, by its name."""
    unplayable: int = 0
    """Number of tasks whose episodes would fail."""
    ends: str | None = None
    """Row at which bad rows would end a run, in the order in which it reads them."""

    @property
    def rows(self) -> int:
        return self.usable + len(self.faults)

    @property
    def good_enough(self) -> bool:
        return self.usable > 0 and len(self.faults) <= self.allowed * self.rows and self.ends is None

    def lines(self, context_tokens: int) -> Iterator[str]:
        yield f"{self.name}: {self.rows} rows, {self.usable} usable"
        if self.usable:
            yield (
                f"  prompt: {min(self.tokens)} to {max(self.tokens)} tokens, median {median(self.tokens):g}, of "
                f"workflow.context_tokens={context_tokens}"
            )
            yield f"  images in a prompt: {min(self.images)} to {max(self.images)}"
            yield "  kinds: " + ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        for where, reason in islice(self.faults.items(), SHOWN):
            yield f"  {reason if where in reason else f'{where}: {reason}'}"
        if len(self.faults) > SHOWN:
            yield f"  and {len(self.faults) - SHOWN} more"
        if self.ends is not None:
            yield f"  {self.ends}"

    def ignored(self) -> Iterator[str]:
        """Lines about parts of the source that have no effect, or not the one that their owner may expect."""
        if self.unused:
            yield "no task is made of: " + ", ".join(f"{name} {count}" for name, count in self.unused.most_common())
        if self.replaced:
            yield f"system messages that workflow.system_prompt replaces: {self.replaced}"
        shared = [name for name, count in self.ids.items() if count > 1]
        if shared:
            yield f"ids that several rows have: {len(shared)}, such as {shared[0]}; extra_info.id should differ"


def check(config: Config, limit: int | None = None) -> Iterator[Found]:
    """Reads the tasks of `data.train` and `data.eval`, the first `limit` of each, and renders their prompts.

    Raises ConfigError or DataError for a fault that is not in the rows.
    """
    with ExitStack() as cleanup:
        runner = cleanup.enter_context(asyncio.Runner())
        setting = make_setting(config, cleanup)
        scratch = Path(cleanup.enter_context(TemporaryDirectory()))
        with config_errors("model"):
            loaded = load_model(config.model, scratch, config.train.seed, torch.device("meta"))
            parts = EpisodeParts.of(setting, loaded)
        workflow = VisionMultiTurnAgenticWorkflow(config.workflow, parts.renderer, parts.new_environment, parts.schemas)
        sources = {"data.train": config.data.train, "data.eval": config.data.eval}
        for key, source in sources.items():
            if source is not None:
                found = Found(f"{key} ({source.path or source.generator})", source.max_skip_share)
                lenient = source.model_copy(update={"max_skip_share": 1.0})  # all faults are wanted
                with config_errors("data"):
                    tasks = task_source(lenient, config, config.train.seed, setting.check_gold)
                judged = config.reward.rule == "benchmark" and config.environment.is_judged
                runner.run(_look(_tasks(tasks, source, limit, found), workflow, judged, found))
                if source.path is not None:
                    found.unused = tasks.unused(found.rows)
                    found.ends = None if limit else _end(tasks, config, key, found)
                yield found


def _tasks(tasks: TaskSource, source: SourceConfig, limit: int | None, found: Found) -> Iterator[Task]:
    try:
        yield from islice(tasks.all(), limit or (None if source.path is not None else GENERATED))
    except DataError:  # no row is usable
        if not tasks.skipped:
            raise
    found.faults |= tasks.skipped


def _end(tasks: TaskSource, config: Config, key: str, found: Found) -> str | None:
    """Row at which a run would end: bad rows in succession may end it, though their share of the file is allowed."""
    runs: dict[str, int | None] = {}
    if key == "data.train":
        runs["a training"] = tasks.ends_after(found.allowed)
    if key == "data.eval" or config.data.eval is None:
        runs["an evaluation"] = tasks.ends_after(found.allowed, config.evaluation.tasks)
    for who, rows in runs.items():
        if rows is not None:
            share = f"max_skip_share is {found.allowed}"
            return f"{who} would end after {rows} rows, of which too many cannot be used; {share}"
    failed, most = found.unplayable / max(1, found.unplayable + found.usable), config.rollout.max_failed_share
    if key == "data.train" and failed > most:
        return f"a training would end: {failed:.0%} of its groups cannot be used; rollout.max_failed_share is {most}"
    return None


async def _look(tasks: Iterator[Task], workflow: VisionMultiTurnAgenticWorkflow, judged: bool, found: Found) -> None:
    """Checks one task. `judged`: an empty answer is judged, too, for a rule that reads more of a task than its gold
    answer.
    """
    for number, task in enumerate(tasks):
        try:
            async with workflow.opened(task) as (environment, conversation):
                if judged:
                    step = await environment.step("", ())
                    if step.judge_error is not None:
                        raise DataError(step.judge_error)
        except (DataError, ValueError) as error:
            name = task.id if task.id not in found.faults else f"{task.id} (task {number})"
            found.faults[name] = str(error)
            found.unplayable += 1
            continue
        finally:
            found.ids[task.id] += 1
        found.replaced += workflow.config.system_prompt is not None and any(m.role == "system" for m in task.messages)
        found.usable += 1
        found.tokens.append(conversation.n_tokens)
        found.images.append(sum(len(segment.images) for segment in conversation.context))
        found.kinds[task.data_source] += 1
