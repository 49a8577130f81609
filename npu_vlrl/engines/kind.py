"""The choices of `rollout.engine`: each engine is a package of this room whose `kind.py` has a `KIND`."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto

from npu_vlrl.config import Config
from npu_vlrl.engines.local import LocalEngine
from npu_vlrl.hardware import Platform
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.vision import VisionFeatures


class Placement(Enum):
    """Which process an engine is in."""

    ONLY = auto()
    """The only one of the training, which learns too."""
    LEARNER = auto()
    """One of several that all learn and sample."""
    ENGINE = auto()
    """One that only samples."""


@dataclass(frozen=True)
class EngineProcess:
    """The parts of a process that its engine is made of."""

    config: Config
    platform: Platform
    device: int
    """Number of its device on this machine, the first where the engine takes several."""
    loaded: LoadedModel
    vision: VisionFeatures | None
    """None where `EngineKind.has_own_weights`, in a process that only samples."""
    placement: Placement
    cleanup: ExitStack
    """Ends what the engine holds."""


class EngineKind(ABC):
    """Checks a configuration for engines of one kind, and makes them."""

    has_own_weights: bool
    """The engine loads the model itself: in an engine process it needs the policy on the device `meta` only, and beside
    a learner it takes memory for a second copy.
    """

    @abstractmethod
    def problems(self, config: Config, platform: Platform, several: bool) -> Iterator[str]:
        """Why these engines cannot sample for this configuration on this platform, each as a sentence that names the
        key and the remedy. `several` processes were started.
        """

    def prepare(self) -> None:  # noqa: B027  # most need nothing
        """Imports what the engine needs. Raises ConfigError where it is not installed."""

    @abstractmethod
    def new(self, process: EngineProcess) -> LocalEngine:
        """Makes the engine of a process. Raises ConfigError, ValueError or OSError where it cannot be made."""


def engine_kind(name: str) -> EngineKind:
    """The kind that `rollout.engine` names."""
    kind: EngineKind = importlib.import_module(f"npu_vlrl.engines.{name}.kind").KIND
    return kind
