"""Memory of a device: its allocator, its end, and the estimate of an update against what the update took."""

from __future__ import annotations

from typing import Any

import torch

from npu_vlrl.acceptance.models import LAYERS, samples_of, shallow
from npu_vlrl.acceptance.worker import Failed, Machine, NotTried
from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.estimate.memory import MemoryModel, Pass
from npu_vlrl.learner.algorithm import resolve
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.vision import VisionFeatures

CLOSE = 1.35
"""How far the measured peak may be from the estimate, either way."""


def allocator(machine: Machine) -> dict[str, Any]:
    """Blocks of lengths that change, half of them given back: memory of what is freed must serve again."""
    platform = machine.platform
    if platform.memory(0) is None:
        raise NotTried("this device has no memory of its own")
    step = 2**20 if machine.reduced else 2**26
    before = platform.memory(machine.rank)
    for round_ in range(8):
        held = [torch.zeros(step + 4096 * (i + round_), dtype=torch.uint8, device=machine.device) for i in range(8)]
        del held[::2]
        held.append(torch.zeros(3 * step, dtype=torch.uint8, device=machine.device))
        del held
    platform.synchronize()
    after = platform.memory(machine.rank)
    assert before is not None and after is not None
    peak, taken = platform.peak_memory_bytes(), before.free - after.free
    if peak > 16 * step:
        raise Failed(f"blocks of {8 * step} bytes at a time took {peak} at the peak", peak=peak)
    return {
        "detail": f"peak {peak / 1e6:.0f} MB, {taken / 1e6:.0f} MB taken from the device",
        "peak_bytes": peak,
        "taken_bytes": taken,
        "free_bytes": after.free,
    }


def out_of_memory(machine: Machine) -> dict[str, Any]:
    """A tensor larger than the device must be refused as torch's OutOfMemoryError, and the device go on."""
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
    """Two updates of the first layers of a published model; `npu-vlrl estimate` says the peak by the same formulas."""
    if machine.platform.memory(0) is None:
        raise NotTried("this device has no memory of its own")
    policy = shallow(machine, model, torch.bfloat16)
    count, length, sampled = (2, 64, 16) if machine.reduced else (4, 2048, 512)
    algorithm = AlgorithmConfig(kl_coef=0.0)
    optim = OptimConfig(micro_batch_tokens=count * length)
    vision = VisionFeatures(policy, None, 0)
    learner = Learner(policy, vision, algorithm, resolve(algorithm), optim, 1.0, 1, platform=machine.platform)
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
