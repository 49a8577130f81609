"""Schedule of asynchronous groups: which may begin and which a step takes, within a bound of the staleness. It uses
neither clock nor engine.

With G groups a step and a staleness of at most η, and the weights of version s before step s:

- the n-th group (from 0) may begin when n // G <= version + η: it is not too old at its step. So at most (η + 1)·G
  groups have begun and are not trained: the queue is bounded, and no group is discarded.
- a step takes the ready groups with the earliest deadlines. Later groups may overtake one that is not ready as long as
  all that have begun can still be trained in time, G a step; then the step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Begun:
    deadline: int
    """The last step that may train on the group: the version that it began with, plus η."""
    ready: bool = False


class Schedule:
    """Schedule of the groups of a training. Groups are numbered in the order in which they begin.

    Example: `Schedule(groups=16, staleness=1, steps=100)`
    """

    def __init__(self, groups: int, staleness: int, steps: int, step: int = 0) -> None:
        """`step` is the next one of `steps`; no group begins that none of them would take."""
        self.groups = groups
        self.staleness = staleness
        self._steps = steps
        self._step = step
        self._number = 0
        self._begun: dict[int, _Begun] = {}
        """Groups that are neither trained nor given up, in the order of their beginning and of their deadlines."""

    @property
    def outstanding(self) -> list[int]:
        """Groups that have begun and are not taken."""
        return list(self._begun)

    @property
    def ready(self) -> int:
        """Number of outstanding groups that are ready."""
        return sum(begun.ready for begun in self._begun.values())

    def admit(self, version: int) -> bool:
        """Whether a group may begin while the engine has this version of the weights."""
        n = self._step * self.groups + len(self._begun)
        return n // self.groups <= min(version + self.staleness, self._steps - 1)

    def begin(self, version: int) -> int:
        """Counts a group that begins; returns its number."""
        assert self.admit(version), "the group would be too old when its step comes"
        number, self._number = self._number, self._number + 1
        self._begun[number] = _Begun(version + self.staleness)
        return number

    def finish(self, number: int) -> None:
        """Marks a group as ready."""
        self._begun[number].ready = True

    def fail(self, number: int) -> None:
        """Gives up a group; another may begin in its place."""
        del self._begun[number]

    def take(self, step: int) -> dict[int, int] | None:
        """Takes the groups of the next step; returns the staleness of each, or None while the step has to wait."""
        assert step == self._step, f"step {step} asks for its groups, and it is the turn of step {self._step}"
        chosen = [number for number, begun in self._begun.items() if begun.ready][: self.groups]
        left = [begun.deadline for number, begun in self._begun.items() if number not in chosen]
        if len(chosen) < self.groups or not self._in_time(left, step + 1):
            return None
        self._step += 1
        return {number: step + self.staleness - self._begun.pop(number).deadline for number in chosen}

    def _in_time(self, deadlines: Sequence[int], step: int) -> bool:
        """Whether groups can be trained before their deadlines, `groups` a step from `step` on."""
        return all(deadline >= step + place // self.groups for place, deadline in enumerate(deadlines))
