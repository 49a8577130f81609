"""What the rest of the code may ask about the machine. One small class per vendor answers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class HardwareError(RuntimeError):
    """The wanted platform is not usable here; the message says what is missing."""


class Platform(ABC):
    """Facts about one kind of device.

    Example: `select().device()` is `torch.device("cpu")` on a laptop.
    """

    name: ClassVar[str]
    kernels: ClassVar[str]
    """The platform's column of the op table."""
    collective_backend: ClassVar[str]
    visible_devices_variable: ClassVar[str | None]

    @abstractmethod
    def missing(self) -> str | None:
        """What keeps the platform from being used, as one sentence; None when it is usable."""

    @abstractmethod
    def device(self, index: int = 0) -> torch.device: ...

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the device's random generator, uint8 [n]."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None: ...

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Largest memory in use since the start (of the device, or of the process on a CPU)."""

    @abstractmethod
    def describe(self) -> str:
        """Name and number of the devices, for people."""
