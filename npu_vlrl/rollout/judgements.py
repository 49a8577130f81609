"""Counts of a judge's failures: a judge that fails on every answer looks like a policy that is never right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from npu_vlrl.types import Trajectory

SHOWN = 5
"""Largest number of distinct messages that are reported."""


class RolloutError(RuntimeError):
    """Too many samples of a step, or too many judgements, cannot be used."""


@dataclass
class Judgements:
    """Number of judged answers, and the reasons for which the judge gave no verdict of its own on some of them.

    Example: `judgements.add(group)` for each group, then `judgements.check(0.5, "step3")`
    """

    answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Number of answers for each message, without the name of the task."""
    checks: Counter[str] = field(default_factory=Counter)
    """Number of answers for each message of a checker of weight 0, which does not affect the reward."""

    @property
    def failed(self) -> int:
        return self.failures.total()

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            for turn in trajectory.turns:
                checks = turn.verdict.checks if turn.verdict is not None else {}
                self.count(trajectory.task.id, turn.verdict is not None, turn.judge_error, checks)

    def count(self, task: str, answer: bool, error: str | None, checks: Mapping[str, bool | str]) -> None:
        """Counts a turn of an episode of `task`; `checks` are those of its verdict."""
        self.answers += answer
        if error is not None:
            self.failures[_without(task, error)] += 1
        for name, found in checks.items():
            if isinstance(found, str):
                self.checks[f"{name}: {_without(task, found)}"] += 1

    def messages(self) -> list[str]:
        """Each message once, the most frequent first."""
        found = [f"the judge failed on {n} of {self.answers} answers: {m}" for m, n in self.failures.most_common(SHOWN)]
        rest = self.failed - sum(n for _, n in self.failures.most_common(SHOWN))
        found += [f"the judge failed on {rest} of {self.answers} answers in other ways"] if rest else []
        checks = self.checks.most_common(SHOWN)
        return [*found, *(f"a checker of weight 0 failed on {n} of {self.answers} answers: {m}" for m, n in checks)]

    def check(self, max_share: float, where: str) -> None:
        """Raises RolloutError, with the judge's messages, when it failed on more than `max_share` of the answers."""
        if self.failed > max_share * self.answers:
            told = "\n  ".join(self.messages())
            raise RolloutError(
                f"the judge failed on {self.failed} of {self.answers} answers of {where}, more than "
                f"rollout.max_failed_share={max_share:g}; mend the reward, or raise reward.deadline_s or that share:"
                f"\n  {told}"
            )


def _without(task: str, error: str) -> str:
    return error.removeprefix(f"{task}: ").removeprefix(f"task {task}: ")
