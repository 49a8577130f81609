"""What a sink is, and all that a run has chosen behind one object.

No sink ends a run: one that fails is told of once and left out from then on. `metrics.jsonl` has everything anyway.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from npu_vlrl.config import ConfigError
from npu_vlrl.config.extras import remedy
from npu_vlrl.types import Image, Trajectory

IDS = "sinks.json"
"""In the run folder: the id under which each service knows the run, so that a resumed one goes on with its curves."""

MOST_PICTURES = 8
"""Of one trajectory."""


@dataclass(frozen=True, eq=False)
class Picture:
    """What the model saw, uint8 [height, width, 3], and what came of it."""

    rgb: np.ndarray
    caption: str


@dataclass(frozen=True)
class Opening:
    """What a sink is told at the beginning.

    Example: `Opening(Path("runs/arrow_tiny"), "3f…", config, first_step=0, resumed=False)`
    """

    folder: Path
    """The run folder; its name is that of the run."""
    id: str
    """32 hexadecimal digits, the same when the run is resumed."""
    config: Mapping[str, Any]
    """The whole configuration, nested."""
    first_step: int
    """The step that comes next; what was recorded from there on is recorded again."""
    resumed: bool

    @classmethod
    def of(cls, folder: Path, name: str, config: Mapping[str, Any], first_step: int, resumed: bool) -> Opening:
        """With the id that the run folder keeps for the sink `name`, or a new one that it keeps from now on."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / IDS
        ids = json.loads(file.read_text()) if file.is_file() else {}
        known = resumed and name in ids
        if not known:
            ids[name] = uuid.uuid4().hex
            file.write_text(json.dumps(ids, indent=2) + "\n")
        return cls(folder, ids[name], config, first_step, known)


class Sink(Protocol):
    """One service. Each is made of an `Opening`. Whatever it raises is told once."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers, named `group/name`. The steps never become smaller; one may come several times."""
        ...

    def pictures(self, step: int, pictures: Sequence[Picture]) -> None:
        """Of one sampled trajectory, in the order in which the model saw them."""
        ...

    def close(self, error: str | None) -> None:
        """The run is done, or `error` says what ended it."""
        ...


class Sinks:
    """All sinks of a run. Leave it as a context: sinks learn how the run ended."""

    def __init__(self, names: Sequence[str], opening: Callable[[str], Opening], tell: Callable[[str], None]) -> None:
        """Raises ConfigError when a sink cannot begin: it is asked for, and its owner is still there to mend it."""
        self._tell = tell
        self._open: dict[str, Sink] = {}
        for name in dict.fromkeys(names):
            module = import_module(f"npu_vlrl.report.sinks.{name}_sink")
            try:
                self._open[name] = module.open_sink(opening(name))
            except Exception as error:  # of somebody else's code: anything
                self.__exit__(type(error), error, None)
                raise ConfigError(f"run.sinks: {name} cannot begin: {error}; mend that, or leave it out") from error

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told = None if error is None else f"{type(error).__name__}: {error}"
        self._each(lambda sink: sink.close(told))
        self._open.clear()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Names without a group are those of the training; numbers that are not finite are left out."""
        named = {k if "/" in k else f"train/{k}": v for k, v in values.items() if math.isfinite(v)}
        self._each(lambda sink: sink.scalars(step, named))

    def trajectory(self, step: int, trajectory: Trajectory) -> None:
        """Its pictures, if it has any."""
        if self._open and (pictures := pictures_of(trajectory)):
            self._each(lambda sink: sink.pictures(step, pictures))

    def _each(self, do: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                do(sink)
            except Exception as error:  # of somebody else's code: anything
                del self._open[name]
                self._tell(f"run.sinks: {name} failed ({error}) and gets nothing more; the run goes on without it")


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError with what to type when the package of a sink is missing; imports nothing."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder that only has the name, such as one with a service's files
            raise ConfigError(f"run.sinks: {name} is not installed: {remedy(name)}, or leave it out")


def pictures_of(trajectory: Trajectory) -> list[Picture]:
    """What the model saw, each picture once, with how the episode ended."""
    if not trajectory.turns:
        return []
    last, task = trajectory.turns[-1], trajectory.task
    caption = f"{last.text!r}, right answer {task.answer!r}, reward {sum(trajectory.turn_rewards):.3g}, "
    caption += f"{trajectory.status.value}, {trajectory.id}"
    seen: dict[Image, None] = dict.fromkeys(item.image for segment in last.context for item in segment.images)
    return [Picture(image.rgb, caption) for image in list(seen)[:MOST_PICTURES]]
