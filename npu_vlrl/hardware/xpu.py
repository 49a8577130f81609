"""GPUs that torch reaches as `torch.xpu`."""

from __future__ import annotations

from typing import Any

import torch

from npu_vlrl.hardware.accelerator import Accelerator


class XpuPlatform(Accelerator):
    name = "xpu"
    kernels = "reference"
    collective_backend = "xccl"
    process_group_backend = "cpu:gloo,xpu:xccl"
    visible_devices_variable = "ZE_AFFINITY_MASK"
    ray_resource = "GPU"
    tool = "xpu-smi"
    graph = "XPUGraph"
    packages = ("ray",)
    watched = ("ZE_", "CCL_")

    def api(self) -> Any:
        return torch.xpu

    def missing(self) -> str | None:
        return None if torch.xpu.is_available() else "torch sees no XPU; check the driver with xpu-smi"
