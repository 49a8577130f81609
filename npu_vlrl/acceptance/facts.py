"""Collects facts about a machine, and checks that its devices respond."""

from __future__ import annotations

import os
import platform as host
import re
from typing import Any

import torch

from npu_vlrl import kernels
from npu_vlrl.acceptance import doctor
from npu_vlrl.acceptance.worker import Machine, NotTried
from npu_vlrl.hardware import software

HIDDEN = re.compile(r"KEY|TOKEN|SECRET|PASS|HOST|ADDR|_IP\b|IFNAME|URL|PROXY|USER")
"""Names of variables whose values may identify a person, a machine or a secret."""
HARMLESS = re.compile(r"[\w:,.=\[\]-]{0,80}")
"""Pattern of values without a path."""


def facts(machine: Machine) -> dict[str, Any]:
    """Head of the report, on which the plan of checks depends."""
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
        "devices": [doctor.device_facts(platform, index) for index in range(count)],
        "environment": {name: _harmless(name, value) for name, value in platform.environment().items()},
        "warnings": platform.warnings(),
        "kernels": kernels.active(),
        "ops": list(kernels.active()),
        "ranks": count if platform.memory(0) is not None else 2,
        "visible_devices_variable": platform.visible_devices_variable,
        "allocator_variable": next(iter(getattr(platform, "allocator_variables", ())), None),
        "launch_environment": {n: s.value for n, s in platform.launch_environment.items() if s.wanted},
    }


def _harmless(name: str, value: str) -> str:
    return value if HARMLESS.fullmatch(value) and not HIDDEN.search(name) else "set (not shown)"


def device(machine: Machine, index: int) -> dict[str, Any]:
    """Checks sums on a device, and copies to it and back. Raises HardwareError."""
    try:
        return {"detail": doctor.compute(machine.platform, index)}
    finally:
        machine.platform.set_device(0)


def streams(machine: Machine) -> dict[str, Any]:
    """Checks the order of two streams. Raises HardwareError."""
    if machine.platform.stream() is None:
        raise NotTried("none on this platform: everything runs in order")
    return {"detail": doctor.streams(machine.platform)}
