"""What a machine has, and whether its devices answer."""

from __future__ import annotations

import os
import platform as host
import re
from typing import Any

import torch

from npu_vlrl import kernels
from npu_vlrl.acceptance.worker import Failed, Machine, NotTried
from npu_vlrl.hardware import Platform, software

HIDDEN = re.compile(r"KEY|TOKEN|SECRET|PASS|HOST|ADDR|_IP\b|IFNAME|URL|PROXY|USER")
"""Variables whose values may say who or where somebody is."""
HARMLESS = re.compile(r"[\w:,.=\[\]-]{0,80}")
"""Values without a path."""


def facts(machine: Machine) -> dict[str, Any]:
    """The head of the report, and what the plan of checks depends on."""
    platform = machine.platform
    count = platform.device_count()
    return {
        "detail": platform.describe(),
        "platform": platform.name,
        "sizes": "reduced: tokens, vocabulary and layers; not for times" if machine.reduced else "full",
        "versions": software.versions(platform),
        "machine": {
            "architecture": host.machine(),
            "system": f"{host.system()} {host.release()}",
            "cores": os.cpu_count(),
            "threads of torch": torch.get_num_threads(),
        },
        "devices": [_device(platform, index) for index in range(count)],
        "environment": {name: _harmless(name, value) for name, value in platform.environment().items()},
        "warnings": platform.warnings(),
        "kernels": kernels.active(),
        "ops": list(kernels.active()),
        "ranks": count if platform.memory(0) is not None else 2,
        "visible_devices_variable": platform.visible_devices_variable,
        "allocator_variable": next(iter(getattr(platform, "allocator_variables", ())), None),
        "launch_environment": {n: s.value for n, s in platform.launch_environment.items() if s.wanted},
    }


def _device(platform: Platform, index: int) -> dict[str, Any]:
    memory, peak = platform.memory(index), platform.peak(index)
    return {
        "name": platform.device_name(index),
        "physical": platform.physical_id(index),
        "memory_free_bytes": memory and memory.free,
        "memory_total_bytes": memory and memory.total,
        "peak_bf16_flops": peak and peak.flops,
    }


def _harmless(name: str, value: str) -> str:
    return value if HARMLESS.fullmatch(value) and not HIDDEN.search(name) else "set (not shown)"


def device(machine: Machine, index: int) -> dict[str, Any]:
    """A sum on the device, and a copy to it and back."""
    platform = machine.platform
    platform.set_device(index)
    try:
        numbers = torch.arange(1, 101, dtype=torch.float32).to(platform.device(index))
        total, back = numbers.sum().item(), (numbers * 2).cpu().tolist()
    finally:
        platform.set_device(0)
    if total != 5050.0 or back != [2.0 * n for n in range(1, 101)]:
        raise Failed(f"the sum of 1 to 100 is {total} and not 5050")
    return {"detail": "adds up"}


def streams(machine: Machine) -> dict[str, Any]:
    """Work of a second stream between events is seen by the first."""
    platform = machine.platform
    second = platform.stream()
    if second is None:
        raise NotTried("none on this platform: everything runs in order")
    numbers = torch.arange(1, 101, dtype=torch.float32, device=machine.device)
    first = torch.accelerator.current_stream()
    second.wait_event(first.record_event())
    with platform.on(second):
        doubled = numbers * 2
    first.wait_event(second.record_event())
    if (total := doubled.sum().item()) != 10100.0:
        raise Failed(f"the sum of what a second stream doubled is {total} and not 10100")
    return {"detail": "two streams, ordered by events"}
