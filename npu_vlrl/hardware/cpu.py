"""The CPU: the platform of the correctness tests and of the quick start."""

from __future__ import annotations

import os
import resource
import sys

import torch

from npu_vlrl.hardware.base import Platform


class CpuPlatform(Platform):
    name = "cpu"
    kernels = "reference"
    collective_backend = "gloo"
    visible_devices_variable = None

    def missing(self) -> str | None:
        return None

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def peak_memory_bytes(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def describe(self) -> str:
        return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
