"""Interface of a sink, and the chosen sinks of a run as one object.

No sink ends a run: a failing sink is reported once and then left out. `metrics.jsonl` has everything anyway.
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
"""File in the run folder with the id of the run in each service, with which a resumed run continues its curves."""

MAX_IMAGES = 8
"""Maximum number of images of one trajectory."""


@dataclass(frozen=True, eq=False)
class CaptionedImage:
    """Image that the model saw, uint8 [height, width, 3], with the result of the episode as caption."""

    rgb: np.ndarray
    caption: str


@dataclass(frozen=True)
class Opening:
    """Arguments of a sink's constructor.

    Example: `Opening(Path("runs/arrow_tiny"), "3f…", config, first_step=0, resumed=False)`
    """

    folder: Path
    """Run folder; its name is the run's."""
    id: str
    """Id of 32 hexadecimal digits, the same when the run is resumed."""
    config: Mapping[str, Any]
    """The whole configuration, nested."""
    first_step: int
    """Next step; records from there on are recorded again."""
    resumed: bool

    @classmethod
    def of(cls, folder: Path, name: str, config: Mapping[str, Any], first_step: int, resumed: bool) -> Opening:
        """Arguments with the id that the run folder keeps for the sink `name`; a new id is stored there."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / IDS
        ids = json.loads(file.read_text()) if file.is_file() else {}
        known = resumed and name in ids
        if not known:
            ids[name] = uuid.uuid4().hex
            file.write_text(json.dumps(ids, indent=2) + "\n")
        return cls(folder, ids[name], config, first_step, known)


class Sink(Protocol):
    """Interface of one service's sink, made of an `Opening`. Its exceptions are reported once."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records finite numbers, named `group/name`. The steps never decrease; one may come several times."""
        ...

    def images(self, step: int, images: Sequence[CaptionedImage]) -> None:
        """Records the images of one sampled trajectory, in the order in which the model saw them."""
        ...

    def close(self, error: str | None) -> None:
        """Ends the run at the service; `error` is the exception that ended it, if any."""
        ...


class Sinks:
    """All sinks of a run. Use it as a context manager: sinks are told how the run ended."""

    def __init__(self, names: Sequence[str], opening: Callable[[str], Opening], tell: Callable[[str], None]) -> None:
        """Raises ConfigError when a sink cannot begin: the user asked for it, and is still there to correct it."""
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
        """Sends numbers to all sinks. Names without a group get `train/`; numbers that are not finite are left out."""
        named = {k if "/" in k else f"train/{k}": v for k, v in values.items() if math.isfinite(v)}
        self._each(lambda sink: sink.scalars(step, named))

    def trajectory(self, step: int, trajectory: Trajectory) -> None:
        """Sends the images of a trajectory to all sinks, if it has any."""
        if self._open and (images := images_of(trajectory)):
            self._each(lambda sink: sink.images(step, images))

    def _each(self, do: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                do(sink)
            except Exception as error:  # of somebody else's code: anything
                del self._open[name]
                self._tell(f"run.sinks: {name} failed ({error}) and gets nothing more; the run goes on without it")


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError with the command to run when the package of a sink is missing; imports nothing."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder that only has the name, such as one with a service's files
            raise ConfigError(f"run.sinks: {name} is not installed: {remedy(name)}, or leave it out")


def images_of(trajectory: Trajectory) -> list[CaptionedImage]:
    """Images that the model saw, each once, with the result of the episode."""
    if not trajectory.turns:
        return []
    last, task = trajectory.turns[-1], trajectory.task
    caption = f"{last.text!r}, right answer {task.answer!r}, reward {sum(trajectory.turn_rewards):.3g}, "
    caption += f"{trajectory.status.value}, {trajectory.id}"
    seen: dict[Image, None] = dict.fromkeys(item.image for segment in last.context for item in segment.images)
    return [CaptionedImage(image.rgb, caption) for image in list(seen)[:MAX_IMAGES]]
