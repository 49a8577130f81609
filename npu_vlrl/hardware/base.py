"""What the rest of the code may ask about the machine. One small class per vendor answers it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch


class HardwareError(RuntimeError):
    """The wanted platform or device is not usable here; the message says what is missing."""


@dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes; `free` counts what every process has left."""

    free: int
    total: int


@dataclass(frozen=True)
class Peak:
    """The maker's published numbers of one device, for utilisation metrics and estimates.

    Example: `Peak(989e12, 3.35e12, "NVIDIA H100 datasheet", 80e9)`
    """

    flops: float
    """Dense bf16 multiply-adds counted as two, a second."""
    bandwidth: float
    """Bytes a second to and from the device's memory."""
    source: str
    memory: float = 0.0
    """Bytes, a GB counted as 10^9; what the driver lets a process use is a little more. 0 where it is not published."""
    called: str = ""
    """What people say for it, where that is another name."""


@dataclass(frozen=True)
class Setting:
    """A recommended value of an environment variable, and why."""

    value: str
    why: str
    unless: str = ""
    """Another variable about the same thing: where that is set, this one stays away."""

    @property
    def wanted(self) -> bool:
        return not (self.unless and self.unless in os.environ)


GraphCapture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs work, records it, and returns what replays it at once."""


class Platform(ABC):
    """Facts about one kind of device. Devices are numbered as torch numbers them, from 0.

    Example: `select().device()` is `torch.device("cpu")` on a laptop.
    """

    name: ClassVar[str]
    kernels: ClassVar[str]
    """The platform's column of the op table."""
    collective_backend: ClassVar[str]
    """What torch.distributed calls the backend that moves this platform's tensors."""
    process_group_backend: ClassVar[str]
    """For a process group with tensors on the device and on the host."""
    visible_devices_variable: ClassVar[str | None]
    ray_resource: ClassVar[str]
    """What Ray calls one device."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Installed packages, beside torch, that the platform runs on or can use."""
    watched: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of environment variables that change how the platform behaves."""
    cautions: ClassVar[Mapping[tuple[str, str], str]] = {}
    """For a value of an environment variable that seldom is what one wants: why, and what to do."""
    launch_environment: ClassVar[Mapping[str, Setting]] = {}
    """What the launch scripts set, unless it is set already."""
    peaks: ClassVar[Mapping[str, Peak]] = {}
    """By device name."""

    @abstractmethod
    def missing(self) -> str | None:
        """What keeps the platform from being used, as one sentence with the remedy; None when it is usable."""

    @abstractmethod
    def device(self, index: int = 0) -> torch.device: ...

    @abstractmethod
    def device_count(self) -> int: ...

    @abstractmethod
    def device_name(self, index: int = 0) -> str: ...

    @abstractmethod
    def physical_id(self, index: int) -> str:
        """The device's number outside this process, as the vendor's tools and the visible-devices variable count."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Makes a device this process's current one. Raises HardwareError when it is not there or does not answer."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the current device has done all that it was given."""

    @abstractmethod
    def stream(self) -> torch.Stream | None:
        """A new stream of the current device; None where there are none and everything runs in order."""

    @abstractmethod
    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Within it, operations of the current device go to that stream."""

    def shareable(self) -> AbstractContextManager[object]:
        """Within it, what is allocated on the current device can be opened by other processes."""
        return nullcontext()

    def vllm_problems(self, dtype: str, sleep: bool) -> Iterator[str]:
        """Why vLLM cannot sample on this platform's devices here with a model of this `model.dtype`, and `sleep` (give
        its memory back for a while), each as a sentence that names the key and the remedy.
        """
        yield from ()

    def graph_capture(self) -> GraphCapture | None:
        """A new one for the current device; None where nothing can be recorded, and everything is run anew.

        The work must not wait for the device, must read and write the same tensors each time, and is run more than once
        to be recorded. Replays of what one object captured must not overlap: they share memory.
        """
        return None

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the device's random generator, uint8 [n]."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None: ...

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Largest memory in use since the start (of the device, or of the process on a CPU)."""

    @abstractmethod
    def memory(self, index: int = 0) -> Memory | None:
        """None where the device has no memory of its own."""

    def versions(self) -> dict[str, str]:
        """Versions of the vendor's own software, by name. Only for a usable platform."""
        return {}

    def environment(self) -> dict[str, str]:
        """The environment variables that are set and change how the platform behaves, in the order of their names."""
        return {name: value for name, value in sorted(os.environ.items()) if name.startswith(self.watched)}

    def warnings(self) -> list[str]:
        """What is set or installed and may not work well, each as one sentence with the remedy."""
        return [
            f"{name}={value}: {caution}"
            for (name, value), caution in self.cautions.items()
            if os.environ.get(name) == value
        ]

    def peak(self, index: int = 0) -> Peak | None:
        """None for a device whose numbers are not published, or not known here."""
        return self.peaks.get(self.device_name(index))

    def describe(self) -> str:
        """Name and number of the devices, for people."""
        return f"{self.device_count()} x {self.device_name()}"
