"""Sources of a run's tasks, in an order that a resumed run continues exactly."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from npu_vlrl.config import ColumnsConfig
from npu_vlrl.data.records import TaskFile, load_tasks
from npu_vlrl.types import DataError, Task

MIN_ROWS_SEEN = 20
"""Minimum number of rows seen before the share of skipped rows can end a run."""

CHANCE = 1e-6
"""Probability below which the bad rows seen so far are not explained by the order of rows."""


class TaskSource:
    """Endless stream of tasks with a position that can be saved.

    Example: `TaskSource.from_records(Path("train.parquet"), seed=0).next(16)`
    """

    def __init__(self, tasks: Callable[[int], Task], identity: dict[str, Any]) -> None:
        self._tasks = tasks
        self._identity = identity
        self._position = 0
        self._again: list[int] = []
        """Earlier positions whose tasks are drawn first."""
        self.skipped: dict[str, str] = {}
        """Bad rows with their faults, by `where`."""

    @classmethod
    def from_records(
        cls,
        path: Path,
        seed: int,
        shuffle: bool = True,
        root: Path | None = None,
        max_skip_share: float = 0.05,
        check_answer: Callable[[str], None] | None = None,
        columns: ColumnsConfig | None = None,
    ) -> TaskSource:
        """Rows of a file (see `load_tasks`), epoch after epoch, each in a new order when `shuffle` is on.

        `check_answer` raises DataError for a gold answer that the judge cannot use, of which "" is a missing one; it
        sees each row once. A row that is no task, or fails that check, is skipped and noted in `skipped`. DataError
        ends the stream when every row of the file was skipped; and, from the 20th row on, when more than
        `max_skip_share` of the file's rows were, or so many of those seen so far that a file with the allowed share
        gives them less than once in a million times (see `surely_above`): 12 of the first 20 where a tenth is allowed.
        """
        return _RecordSource(load_tasks(path, root, columns), seed, shuffle, max_skip_share, check_answer)

    @classmethod
    def generated(cls, make: Callable[[int], Task]) -> TaskSource:
        """Tasks `make(0), make(1), ...`; `make` is a function of the index alone, and its ids hold the seed."""
        return cls(make, {"kind": "generated", "first_task": make(0).id})

    def next(self, n: int) -> list[Task]:
        """Draws the next `n` tasks."""
        return [self.draw()[1] for _ in range(n)]

    def try_first(self) -> None:
        """Reads the first rows as `next` would, and restores the position. Raises DataError where they end the
        stream.
        """
        before = self.state_dict()
        self.next(MIN_ROWS_SEEN)
        self.load_state_dict(before)

    def draw(self) -> tuple[int, Task]:
        """Draws the next task; returns it with its position, which no other task of a run has."""
        while True:
            position = self._again.pop(0) if self._again else self._position
            self._position = max(self._position, position + 1)
            task = self._at(position)
            if task is not None:
                return position, task

    def _at(self, position: int) -> Task | None:
        """The task at a position; None for a skipped row."""
        return self._tasks(position)

    def unused(self, rows: int) -> Counter[str]:
        """Number of the first rows that hold a column or field without effect, by its name."""
        return Counter()

    def ends_after(self, max_skip_share: float, usable: int | None = None) -> int | None:
        """Number of rows that a run with this share reads until those in `skipped`, the bad rows, end it; None: never.

        The run reads an epoch in its shuffled order, or, as an evaluation does, `usable` tasks in file order (0: all).
        """
        return None

    def all(self) -> Iterator[Task]:
        """One pass in file order, independent of `next`'s position; endless for generated tasks."""
        index = 0
        while True:
            yield self._tasks(index)
            index += 1

    def state_dict(self, unfinished: Sequence[int] = ()) -> dict[str, Any]:
        """The position, as plain JSON. Tasks at the positions `unfinished`, which were drawn, will be drawn again."""
        again = [*unfinished, *self._again]
        return {"identity": dict(self._identity), "position": self._position, "again": again}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position. Raises ValueError when `state` belongs to other data or another seed."""
        for key, here in self._identity.items():
            saved = state["identity"].get(key)
            if saved != here:
                raise ValueError(
                    f"the saved position belongs to other data: its {key} is {saved!r}, here it is {here!r}; resume "
                    "with the same data and seed, or start a new run"
                )
        self._position, self._again = state["position"], list(state.get("again", ()))  # older ones have nothing again


class _RecordSource(TaskSource):
    """Tasks of a file. `_position` counts drawn and skipped rows: row `position % n` of epoch `position // n`."""

    def __init__(
        self,
        tasks: TaskFile,
        seed: int,
        shuffle: bool,
        max_skip_share: float,
        check_answer: Callable[[str], None] | None,
    ) -> None:
        records = tasks.records
        identity = {"kind": "records", "file": records.name, "content": records.fingerprint, "rows": len(records)}
        super().__init__(tasks.__getitem__, identity | {"seed": seed, "shuffle": shuffle})
        self._file = tasks
        self._seed, self._shuffle, self._max_skip_share = seed, shuffle, max_skip_share
        self._check_answer = check_answer
        self._checked: set[int] = set()
        self._seen = self._failures = 0
        self._epoch, self._order = -1, list(range(len(tasks)))

    def _at(self, position: int) -> Task | None:
        return self._try(self._row(position))

    def all(self) -> Iterator[Task]:
        for row in range(len(self._file)):
            task = self._try(row)
            if task is not None:
                yield task

    def unused(self, rows: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in range(rows):
            with suppress(DataError):  # a row that cannot be read is in `skipped`
                found.update(self._file.unused(row))
        return found

    def ends_after(self, max_skip_share: float, usable: int | None = None) -> int | None:
        bad = 0
        for seen in range(1, len(self._file) + 1):
            row = self._row(seen - 1) if usable is None else seen - 1
            bad += self._file.records.where(row) in self.skipped
            if too_many(max_skip_share, bad, bad, seen, len(self._file)):
                return seen
            if usable and seen - bad >= usable:
                return None
        return None

    def state_dict(self, unfinished: Sequence[int] = ()) -> dict[str, Any]:
        seen = self._seen - len(unfinished)  # they will be seen again
        counts = {"seen": seen, "failures": self._failures, "skipped": dict(self.skipped)}
        return super().state_dict(unfinished) | counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._seen, self._failures, self.skipped = state["seen"], state["failures"], dict(state["skipped"])

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, len(self._file))
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._file)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[place]

    def _try(self, row: int) -> Task | None:
        task = None
        self._seen += 1
        try:
            found = self._file[row]
            if self._check_answer is not None and row not in self._checked:
                self._check_gold(row, found.answer, self._check_answer)
                self._checked.add(row)
            task = found
        except DataError as error:
            self._failures += 1
            self.skipped[self._file.records.where(row)] = str(error)
        self._check_share()
        return task

    def _check_gold(self, row: int, answer: str | None, check: Callable[[str], None]) -> None:
        try:
            check(answer or "")
        except DataError as error:
            field = f"{self._file.records.where(row)}, reward_model.ground_truth"
            if answer is None:
                raise DataError(f"{field}: empty, but the reward rule needs the right answer; fill it in") from error
            raise DataError(f"{field}: {error}") from error

    def _check_share(self) -> None:
        name, last = self._file.records.name, next(reversed(self.skipped.values()), "")
        if len(self.skipped) == len(self._file):
            raise DataError(f"{name}: none of its {len(self._file)} rows can be used; the last one: {last}")
        if too_many(self._max_skip_share, len(self.skipped), self._failures, self._seen, len(self._file)):
            raise DataError(
                f"{name}: {self._failures} of {self._seen} rows were skipped, more than the allowed share "
                f"{self._max_skip_share}; correct the file or allow more. The last one: {last}"
            )


def too_many(share: float, bad: int, failures: int, seen: int, rows: int) -> bool:
    """Whether bad rows end a run: they are more than `share` of the file's `rows`, or surely will be, by the rows seen.

    `bad` counts different rows; `failures` of `seen` count a row in each epoch.
    """
    return seen >= MIN_ROWS_SEEN and (bad / rows > share or surely_above(share, failures, seen))


def surely_above(share: float, bad: int, seen: int) -> bool:
    """Whether `bad` of `seen` rows in a random order have a probability below `CHANCE` if at most `share` of all are.

    Computed by Chernoff's bound, which holds for draws without repetition, too (Hoeffding 1963, theorems 1 and 4).

    Example: `surely_above(0.1, bad=12, seen=20) and not surely_above(0.1, bad=3, seen=20)`
    """
    found = bad / seen
    if found <= share:
        return False
    if share == 0:
        return True
    good = (1 - found) * math.log((1 - found) / (1 - share)) if bad < seen else 0.0
    return seen * (found * math.log(found / share) + good) > -math.log(CHANCE)
