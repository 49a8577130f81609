"""Results of an evaluation: the answers to each task, from the records of its episodes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from npu_vlrl.report.statistics import pass_at_k, powers_of_two
from npu_vlrl.report.verdicts import disagrees, verdict_of
from npu_vlrl.types import EpisodeStatus, Image, Task
from npu_vlrl.workflow.export import RewardMode, trajectory_reward

Item = TypeVar("Item")

SIDES = (0, 128, 256, 512, 1024)
"""Bounds of the image sizes, as sides of squares with as many pixels."""


@dataclass(frozen=True)
class Answer:
    """One episode in the numbers of an evaluation. A failed one is not solved."""

    first: bool
    """Whether the first judged answer was right."""
    solved: bool
    """Whether the episode was solved, retries included."""
    reward: float
    """Reward that training would count for the episode."""
    turns: int
    failed: bool
    judge_failed: float | None = None
    """Share of its judged turns on which the judge failed; None where no turn was judged."""
    judge_disagreement: float | None = None
    """Share of the turns that a checker of weight 0 judged, where one disagreed; None where there are none."""


@dataclass(frozen=True)
class TaskResult:
    """All answers to one task.

    Example: `TaskResult("test/7", "9f…", "mme", "mme", "OCR", "OCR", 200704, "OCR/7.png", (answer,))`
    """

    task: str
    fingerprint: str
    """Fingerprint of everything that the model is asked and judged by; see `fingerprint`."""
    data_source: str
    benchmark: str | None
    """Value of `extra_info.benchmark`, which our adapters write."""
    category: str | None
    """Value of `extra_info.category`."""
    image_type: str
    """Value of `extra_info.image_type`; else the data source, or `no image` where the model saw none."""
    image_pixels: int
    """Pixels of all images before the first answer, as the model saw them."""
    picture: str | None
    """Value of `extra_info.picture`: tasks about the same image belong together (MME)."""
    answers: tuple[Answer, ...]

    @property
    def image_size(self) -> str:
        """Class of the image size, e.g. `256² to 512² pixels`."""
        if not self.image_pixels:
            return "no image"
        low = max(side for side in SIDES if self.image_pixels >= side**2)
        high = min((side for side in SIDES if self.image_pixels < side**2), default=None)
        return f"{low}² to {high}² pixels" if high else f"{low}² pixels and more"

    def measures(self) -> dict[str, float]:
        """Means over the answers, and with several of them `avg@n` and `pass@k` of solved episodes. `judge_failed` is
        over the answers with a judged turn, and left out where there is none.
        """
        n = len(self.answers)
        found = {
            "accuracy": sum(a.first for a in self.answers) / n,
            "after_retries": sum(a.solved for a in self.answers) / n,
            "reward": sum(a.reward for a in self.answers) / n,
            "turns": sum(a.turns for a in self.answers) / n,
            "failed": sum(a.failed for a in self.answers) / n,
        }
        if judged := [a.judge_failed for a in self.answers if a.judge_failed is not None]:
            found["judge_failed"] = sum(judged) / len(judged)
        disagreement = [a.judge_disagreement for a in self.answers if a.judge_disagreement is not None]
        if disagreement:
            found["judge_disagreement"] = sum(disagreement) / len(disagreement)
        if n > 1:
            right = sum(a.solved for a in self.answers)
            found[f"avg@{n}"] = right / n
            found |= {f"pass@{k}": pass_at_k(right, n, k) for k in powers_of_two(n)}
        return found


def answer_of(record: Mapping[str, Any], mode: RewardMode, discount: float) -> Answer:
    """Answer of a line of `trajectories.jsonl`."""
    turns = record["turns"]
    rewards = [turn["action"]["reward"] for turn in turns]
    verdicts = [turn["verdict"] and turn["verdict"]["reward"] for turn in turns]
    judged = [verdict_of(turn["verdict"]) for turn in turns if turn["verdict"] is not None]
    disagree = [found for verdict in judged if (found := disagrees(verdict)) is not None]
    unjudged = sum(turn["judge_error"] is not None for turn in turns)
    return Answer(
        first=record["solved_first_try"],
        solved=record["solved"],
        reward=trajectory_reward(rewards, verdicts, mode, discount),
        turns=len(turns),
        failed=record["status"] == EpisodeStatus.FAILED.value,
        judge_failed=unjudged / len(judged) if judged else None,
        judge_disagreement=sum(disagree) / len(disagree) if disagree else None,
    )


def task_result(
    task: Task, records: Sequence[Mapping[str, Any]], mode: RewardMode, discount: float, patch_size: int
) -> TaskResult:
    """Result of a task from the records of its answers; `patch_size` is the side of an image patch in pixels."""
    pixels = next((_pixels(r, patch_size) for r in records if r["turns"]), 0)
    extra = {key: value for key, value in task.extra.items() if isinstance(value, str)}
    return TaskResult(
        task.id,
        fingerprint(task),
        task.data_source,
        extra.get("benchmark"),
        extra.get("category"),
        extra.get("image_type") or (task.data_source if pixels else "no image"),
        pixels,
        extra.get("picture"),
        tuple(answer_of(record, mode, discount) for record in records),
    )


def fingerprint(task: Task) -> str:
    """Digest that is equal for tasks with the same question, images, answer and extra information."""

    def plain(value: Any) -> str:
        return value.hash if isinstance(value, Image) else repr(value)

    messages = [[message.role, list(message.parts)] for message in task.messages]
    text = json.dumps([messages, task.answer, dict(task.extra)], default=plain, sort_keys=True)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _pixels(record: Mapping[str, Any], patch_size: int) -> int:
    context = record["turns"][0]["new_context"]
    grids: list[list[int]] = [image["grid"] for segment in context for image in segment.get("images", ())]
    return sum(tiles * rows * columns for tiles, rows, columns in grids) * patch_size**2


def divided(items: Sequence[Item], name_of: Callable[[Item], str | None]) -> dict[str, list[Item]]:
    """Items of each name, in the order of names, in which numbers are sorted as numbers; None leaves an item out."""
    found: dict[str, list[Item]] = {}
    for item in items:
        if (name := name_of(item)) is not None:
            found.setdefault(name, []).append(item)
    return {name: found[name] for name in sorted(found, key=_natural)}


def _natural(name: str) -> list[str | int]:
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", name))]
