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
    """Role of the process that an engine is in."""

    ONLY = auto()
    """The only process of the training, which also learns."""
    LEARNER = auto()
    """One of several processes that all learn and sample."""
    ENGINE = auto()
    """A process that only samples."""


@dataclass(frozen=True)
class EngineProcess:
    """The parts of a process from which its engine is made."""

    config: Config
    platform: Platform
    device: int
    """Number of the engine's device on this machine, the first where the engine takes several."""
    loaded: LoadedModel
    vision: VisionFeatures | None
    """Vision features of the policy; None where `EngineKind.has_own_weights`, in a process that only samples."""
    placement: Placement
    cleanup: ExitStack
    """Stack of callbacks that release the engine's resources."""


class EngineKind(ABC):
    """Checks a configuration for engines of one kind, and makes them."""

    has_own_weights: bool
    """Whether the engine loads the model itself. In an engine process it then needs the policy on the device `meta`
    only, and beside a learner it takes memory for a second copy.
    """

    @abstractmethod
    def problems(self, config: Config, platform: Platform, several: bool) -> Iterator[str]:
        """Reasons for which these engines cannot sample for this configuration on this platform, each as a sentence
        that names the key and the remedy. `several`: whether several processes were started.
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
