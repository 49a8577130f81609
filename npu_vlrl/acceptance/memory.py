"""Tests the memory of a device: its allocator, its end, and the estimate of an update against the measurement."""

from __future__ import annotations

from typing import Any

import torch

from npu_vlrl.acceptance.models import LAYERS, samples_of, shallow
from npu_vlrl.acceptance.worker import Failed, Machine, NotTried
from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.estimate.memory import MemoryModel, Pass
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.vision import VisionFeatures

SLACK = 2**26
"""Bytes that the allocator may take beyond twice the used ones: it allocates in blocks."""

CLOSE = 1.35
"""Largest factor between the measured peak and the estimate, either way."""


def allocator(machine: Machine) -> dict[str, Any]:
    """Tests the allocator with blocks of changing lengths, half of them freed: freed memory must be reused."""
    platform = machine.platform
    if platform.memory(0) is None:
        raise NotTried("this device has no memory of its own")
    step = 2**20 if machine.reduced else 2**26
    before = platform.memory(0)
    for round_ in range(8):
        held = [torch.zeros(step + 4096 * (i + round_), dtype=torch.uint8, device=machine.device) for i in range(8)]
        del held[::2]
        held.append(torch.zeros(3 * step, dtype=torch.uint8, device=machine.device))
        del held
    platform.synchronize()
    after = platform.memory(0)
    assert before is not None and after is not None
    taken, most = before.free - after.free, 11 * step
    found = {"most_at_once_bytes": most, "taken_bytes": taken, "free_bytes": after.free}
    detail = f"{most / 1e6:.0f} MB at a time took {taken / 1e6:.0f} MB of the device"
    if taken > 2 * most + SLACK:
        raise Failed(f"{detail}: what is freed does not serve again", **found)
    return {"detail": detail, **found}


def out_of_memory(machine: Machine) -> dict[str, Any]:
    """Tests that a tensor larger than the device raises torch's OutOfMemoryError, and that the device continues."""
    memory = machine.platform.memory(0)
    if memory is None:
        raise NotTried("this device has no memory of its own")
    try:
        torch.zeros(2 * memory.total, dtype=torch.uint8, device=machine.device)
    except torch.OutOfMemoryError as error:
        said = str(error).splitlines()[0]
    else:
        raise Failed("a tensor twice as large as the device was made")
    if torch.ones(4, device=machine.device).sum().item() != 4.0:
        raise Failed("the device adds wrongly after it ran out of memory")
    return {"detail": f"refused, and the device goes on: {said[:160]}"}


def estimate(machine: Machine, model: str) -> dict[str, Any]:
    """Compares the peak of two updates of a published model's first layers with the formulas of `npu-vlrl estimate`."""
    if machine.platform.memory(0) is None:
        raise NotTried("this device has no memory of its own")
    policy = shallow(machine, model, torch.bfloat16)
    count, length, sampled = (2, 64, 16) if machine.reduced else (4, 2048, 512)
    algorithm = AlgorithmConfig(kl_coef=0.0)
    optim = OptimConfig(micro_batch_tokens=count * length)
    vision = VisionFeatures(policy, None, 0)
    learner = Learner(policy, vision, algorithm, optim, 1.0, 1, platform=machine.platform)
    samples = samples_of(policy, count, length, sampled)
    losses = [learner.supervise(samples, lr=1e-4) for _ in range(2)]
    work = Pass(count * length, count * length, count * length * (length + 1) // 2, count * sampled)
    moment = MemoryModel(policy).update([work, work])
    measured = machine.platform.peak_memory_bytes()
    found = {
        "layers": LAYERS,
        "tokens": count * length,
        "estimated_bytes": round(moment.total),
        "measured_bytes": measured,
        "fullest": moment.name,
        "losses": losses,
    }
    detail = f"{measured / 1e9:.2f} GB measured, {moment.total / 1e9:.2f} GB estimated"
    if not 1 / CLOSE <= measured / moment.total <= CLOSE and not machine.reduced:
        raise Failed(detail, **found)
    return {"detail": detail, **found}
