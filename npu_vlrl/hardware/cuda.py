"""NVIDIA GPUs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from npu_vlrl.hardware.accelerator import Accelerator
from npu_vlrl.hardware.base import Peak, Setting

DRIVER_VERSION = "/proc/driver/nvidia/version"
"""File that the kernel module writes; it also exists in containers."""


class CudaPlatform(Accelerator):
    name = "cuda"
    kernels = "cuda"
    collective_backend = "nccl"
    process_group_backend = "cpu:gloo,cuda:nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    tool = "nvidia-smi"
    graph = "CUDAGraph"
    allocator_variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    packages = ("triton", "vllm", "ray")
    watched = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GLOO_")
    cautions = {
        ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel is waited for, which is for finding errors; unset it to train",
    }
    launch_environment = {
        "PYTORCH_CUDA_ALLOC_CONF": Setting(
            "expandable_segments:True",
            "lengths change from step to step; segments that grow do not fragment",
            unless="PYTORCH_ALLOC_CONF",
        ),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": Setting(
            "0", "whoever waits for a dead process names it and ends; the watchdog would abort without a name"
        ),
    }
    peaks = {
        "NVIDIA A100-SXM4-40GB": Peak(312e12, 1.555e12, "NVIDIA A100 datasheet", 40e9, "A100-40GB"),
        "NVIDIA A100-SXM4-80GB": Peak(312e12, 2.039e12, "NVIDIA A100 datasheet", 80e9, "A100-80GB"),
        "NVIDIA A100 80GB PCIe": Peak(312e12, 1.935e12, "NVIDIA A100 datasheet", 80e9, "A100-PCIe"),
        "NVIDIA H100 80GB HBM3": Peak(989e12, 3.35e12, "NVIDIA H100 datasheet, SXM", 80e9, "H100"),
        "NVIDIA H200": Peak(989e12, 4.8e12, "NVIDIA H200 datasheet, SXM", 141e9, "H200"),
    }

    def api(self) -> Any:
        return torch.cuda

    def missing(self) -> str | None:
        if torch.version.cuda is None:
            return "the installed torch was built without CUDA; install requirements-gpu.txt"
        if not torch.cuda.is_available():
            shown = os.environ.get(self.visible_devices_variable or "")
            variable = "CUDA_VISIBLE_DEVICES" + ("" if shown is None else f"={shown}")
            return f"torch sees no CUDA device; check the driver with nvidia-smi, and {variable}"
        return None

    def set_device(self, index: int) -> None:
        """Makes a device current, and disables TF32 in convolutions, torch's default: the rounded gradient of the patch
        embedding changed the sign of Adam's first steps, and a run differed from that of a CPU after one update.
        """
        super().set_device(index)
        torch.backends.cudnn.allow_tf32 = False

    def versions(self) -> dict[str, str]:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return {
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "NCCL": nccl,
            "NVIDIA driver": _driver_version(),
        }


def _driver_version() -> str:
    """The version in a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 …`."""
    file = Path(DRIVER_VERSION)
    found = re.search(r"^NVRM version:.*?\s(\d+(\.\d+)+)\s", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1] if found else f"unknown (no {DRIVER_VERSION})"
