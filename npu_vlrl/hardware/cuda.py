"""NVIDIA GPUs."""

from __future__ import annotations

import torch

from npu_vlrl.hardware.base import Platform


class CudaPlatform(Platform):
    name = "cuda"
    kernels = "cuda"
    collective_backend = "nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"

    def missing(self) -> str | None:
        if torch.version.cuda is None:
            return "the installed torch was built without CUDA; install requirements-gpu.txt"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device; check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return None

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cuda", index)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def describe(self) -> str:
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
