"""Interface of a platform: all that the rest of the code may ask about devices. Each vendor has one small class."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch


class HardwareError(RuntimeError):
    """The requested platform or device is not usable here; the message says what is missing."""


@dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes; `free` is what all processes together have left."""

    free: int
    total: int


@dataclass(frozen=True)
class Peak:
    """The maker's published numbers of one device, for utilisation metrics and estimates.

    Example: `Peak(989e12, 3.35e12, "NVIDIA H100 datasheet", 80e9)`
    """

    flops: float
    """Dense bf16 operations a second; a multiply-add counts as two."""
    bandwidth: float
    """Bytes a second to and from the device's memory."""
    source: str
    memory: float = 0.0
    """Bytes, a GB counted as 10^9; the driver lets a process use a little more. 0 where it is not published."""
    called: str = ""
    """Common name of the device, where it is not its technical one."""


@dataclass(frozen=True)
class Setting:
    """A recommended value of an environment variable, and why."""

    value: str
    why: str
    unless: str = ""
    """Another variable for the same setting: where it is set, this one is not recommended."""

    @property
    def wanted(self) -> bool:
        return not (self.unless and self.unless in os.environ)


GraphCapture = Callable[[Callable[[], None]], Callable[[], None]]
"""Function that runs work, captures it as a graph, and returns a function that replays the graph."""


class Platform(ABC):
    """Facts about one kind of device. Devices are numbered as torch numbers them, from 0.

    Example: `select().device()` is `torch.device("cpu")` on a laptop.
    """

    name: ClassVar[str]
    kernels: ClassVar[str]
    """The platform's column of the op table."""
    collective_backend: ClassVar[str]
    """Torch.distributed's name of the backend for tensors of this platform."""
    process_group_backend: ClassVar[str]
    """Backends of a process group with tensors on the device and on the host."""
    visible_devices_variable: ClassVar[str | None]
    ray_resource: ClassVar[str]
    """Ray's name of the resource that counts devices."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Installed packages, beside torch, that the platform runs on or can use."""
    watched: ClassVar[tuple[str, ...]] = ()
    """Prefixes of environment variables that change how the platform behaves."""
    cautions: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Warnings about values of environment variables that are rarely right: the reason and the remedy."""
    launch_environment: ClassVar[Mapping[str, Setting]] = {}
    """Variables that the launch scripts set, unless they are set already."""
    peaks: ClassVar[Mapping[str, Peak]] = {}
    """Published numbers by device name."""

    @abstractmethod
    def missing(self) -> str | None:
        """Reason for which the platform is not usable, as one sentence with the remedy; None when it is usable."""

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
        """Makes a device current in this process. Raises HardwareError when it does not exist or does not answer."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the current device has finished all launched work."""

    @abstractmethod
    def stream(self) -> torch.Stream | None:
        """Creates a stream of the current device; None where there are no streams and everything runs in order."""

    @abstractmethod
    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Context in which operations of the current device go to `stream`."""

    def shareable(self) -> AbstractContextManager[object]:
        """Context in which new allocations on the current device can be opened by other processes."""
        return nullcontext()

    def vllm_problems(self, dtype: str, sleep: bool) -> Iterator[str]:
        """Reasons for which vLLM cannot sample on this platform with this `model.dtype` or cannot `sleep` (release its
        memory for a while), each as a sentence that names the key and the remedy.
        """
        yield from ()

    def graph_capture(self) -> GraphCapture | None:
        """Creates a graph capture for the current device; None where the device captures no graphs.

        The work must not wait for the device, must read and write the same tensors each time, and is run more than once
        for the capture. Replays of the graphs of one capture must not overlap: they share memory.
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
        """Free and total memory of a device; None where it has no memory of its own."""

    def versions(self) -> dict[str, str]:
        """Versions of the vendor's own software, by name. The platform must be usable."""
        return {}

    def environment(self) -> dict[str, str]:
        """The environment variables that are set and change how the platform behaves, in the order of their names."""
        return {name: value for name, value in sorted(os.environ.items()) if name.startswith(self.watched)}

    def warnings(self) -> list[str]:
        """Warnings about settings and packages that may not work well, each as one sentence with the remedy."""
        return [
            f"{name}={value}: {caution}"
            for (name, value), caution in self.cautions.items()
            if os.environ.get(name) == value
        ]

    def peak(self, index: int = 0) -> Peak | None:
        """Published numbers of a device; None where they are not published, or not known here."""
        return self.peaks.get(self.device_name(index))

    def describe(self) -> str:
        """Name and number of the devices, for messages."""
        return f"{self.device_count()} x {self.device_name()}"
