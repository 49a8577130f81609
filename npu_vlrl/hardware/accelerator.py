"""Shared base of CUDA and Ascend devices, for which torch has interfaces with the same names."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from npu_vlrl.hardware.base import GraphCapture, HardwareError, Memory, Platform

SEGMENTS = "expandable_segments"
"""Name of the allocator's setting for segments that grow in place."""


class Accelerator(Platform):
    """Devices with memory, streams and a random generator of their own."""

    tool: str
    """The vendor's command that shows devices."""
    graph: str
    """Torch's class of a captured graph."""
    allocator_variables: tuple[str, ...]
    """Variables with settings of torch's allocator; the first that is set counts."""

    @abstractmethod
    def api(self) -> Any:
        """Torch's module for the devices, such as `torch.cuda`."""

    def device(self, index: int = 0) -> torch.device:
        self.api()
        return torch.device(self.name, index)

    def device_count(self) -> int:
        count: int = self.api().device_count()
        return count

    def device_name(self, index: int = 0) -> str:
        name: str = self.api().get_device_name(index)
        return name

    def physical_id(self, index: int) -> str:
        visible = self.visible_devices()
        return str(index) if visible is None else visible[index]

    def visible_devices(self) -> list[str] | None:
        """The entries of the visible-devices variable, None when it is not set."""
        assert self.visible_devices_variable is not None
        value = os.environ.get(self.visible_devices_variable)
        return None if value is None else [part.strip() for part in value.split(",") if part.strip()]

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            raise HardwareError(
                f"{self.name} device {index} is not there: {count} visible; start at most {count} processes on this "
                f"machine, or let {self.visible_devices_variable} show more"
            )
        try:
            self.api().set_device(index)
            self.api().synchronize()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise HardwareError(
                f"{self.name} device {index} (physical {self.physical_id(index)}) does not answer: {reason}; look at "
                f"its state with {self.tool}, and reset it or leave it out with {self.visible_devices_variable}"
            ) from error

    def synchronize(self) -> None:
        self.api().synchronize()

    def stream(self) -> torch.Stream:
        stream: torch.Stream = self.api().Stream()
        return stream

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        entered: AbstractContextManager[object] = self.api().stream(stream)
        return entered

    def allocator_settings(self) -> tuple[str, str] | None:
        """The name and the value of the variable that counts, without spaces; None where none is set."""
        there = (name for name in self.allocator_variables if name in os.environ)
        return next(((name, os.environ[name].replace(" ", "")) for name in there), None)

    @contextmanager
    def shareable(self) -> Iterator[None]:
        """Allocates without expandable segments: to open such a segment, another process needs rights over this one
        (`pidfd_getfd`), which containers and `ptrace_scope=1` deny. torch then reuses no block of such a segment.
        """
        _, settings = self.allocator_settings() or ("", "")
        if f"{SEGMENTS}:True" not in settings:
            yield
            return
        self._set_allocator(settings.replace(f"{SEGMENTS}:True", f"{SEGMENTS}:False"))
        try:
            yield
        finally:
            self._set_allocator(settings)

    def _set_allocator(self, settings: str) -> None:
        """Sets all settings of the allocator: torch takes the default for each one that is left out."""
        self.api().memory._set_allocator_settings(settings)

    def graph_capture(self) -> GraphCapture | None:
        api = self.api()
        pool = api.graph_pool_handle()

        def capture(work: Callable[[], None]) -> Callable[[], None]:
            aside = api.Stream()
            aside.wait_stream(api.current_stream())
            with api.stream(aside):
                work()  # the first call may compile or select kernels, which must not be captured
            api.current_stream().wait_stream(aside)
            graph = getattr(api, self.graph)()
            with api.graph(graph, pool=pool):
                work()
            replay: Callable[[], None] = graph.replay
            return replay

        return capture

    def rng_state(self) -> torch.Tensor:
        state: torch.Tensor = self.api().get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.api().set_rng_state(state)

    def peak_memory_bytes(self) -> int:
        peak: int = self.api().max_memory_allocated()
        return peak

    def memory(self, index: int = 0) -> Memory:
        free, total = self.api().mem_get_info(index)
        return Memory(free, total)
