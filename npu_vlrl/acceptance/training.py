"""Tests several processes of a training together: weight synchronisation, and updates of several learners."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from npu_vlrl.acceptance.models import samples_of, scratch, tiny_config
from npu_vlrl.acceptance.worker import Failed, Machine
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.network.messages import Message
from npu_vlrl.network.world import LEARNER
from npu_vlrl.sync.buckets import in_place
from npu_vlrl.sync.weights import SyncError, WeightReceiver, Weights, WeightSender
from npu_vlrl.training import processes

LOSS_TOLERANCE = 1e-3
"""Largest difference in nats between several learners and one, in float32."""


class Bits(Message):
    """Checksums of the weights that an engine holds after an update."""

    sums: list[int]


def weights(machine: Machine) -> dict[str, Any]:
    """Sends two versions as a training does: buckets, checksums of each, commit. The engines' bits are then compared
    with the learner's once more. Raises SyncError and PeerError as a training would.
    """
    world = machine.world
    size = 2**17 if machine.reduced else 2**28
    shapes = {"large": (size,), "odd": (1021, 3), "scalar": (1,)} | {f"layer.{i}": (64, 512) for i in range(8)}
    held = {name: torch.zeros(shape, dtype=torch.bfloat16, device=machine.device) for name, shape in shapes.items()}
    if world.rank != LEARNER:
        _receive(machine, held)
        return {"detail": "received"}
    sender = WeightSender(world, held, bucket_bytes=2**18 if machine.reduced else 2**28)
    reports = []
    for version in (0, 1):
        _change(held, version)
        reports.append(sender.send(version))
        ours = _bits(held)
        for rank in world.engines:
            if world.channel(rank).expect(Bits, world.timeout_s, SyncError).sums != ours:
                raise Failed(f"rank {rank} holds other bits of version {version}, though checksums agreed")
    last = reports[-1]
    return {
        "detail": f"{last.bytes_sent / 1e6:.1f} MB in {last.buckets} buckets to {len(world.engines)} engines, "
        f"{last.seconds:.2f} s; the same bits",
        "bytes": last.bytes_sent,
        "transfer_s": [report.seconds for report in reports],
    }


def _receive(machine: Machine, held: dict[str, Tensor]) -> None:
    channel = machine.world.channel(LEARNER)
    receiver = WeightReceiver(machine.world, in_place(held))
    for _ in range(2):
        receiver.receive(channel.expect(Weights, machine.world.timeout_s, SyncError))
        channel.send(Bits(_bits(held)))


@torch.no_grad()
def _change(held: dict[str, Tensor], version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    for tensor in held.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def _bits(held: dict[str, Tensor]) -> list[int]:
    """Checksum of each tensor's bits, in which every position has its own factor."""
    sums = []
    for tensor in held.values():
        bits = tensor.flatten().view(torch.int16).long()
        sums.append(int((bits * (torch.arange(len(bits), device=bits.device) % 8191 + 1)).sum()))
    return sums


def learners(machine: Machine, shard: bool) -> dict[str, Any]:
    """Compares three supervised steps of all processes together with one process on the same samples."""
    world = machine.world
    config = tiny_config("qwen2_5_vl", "float32", train={"learners": "all", "shard": shard})
    losses: dict[str, list[float]] = {}
    with scratch() as folder:
        began = time.monotonic()
        _, group = machine.group("all")
        for name, ranks in (("together", Ranks(group)), ("alone", Ranks())):
            own = config if name == "together" else tiny_config("qwen2_5_vl", "float32")
            loaded, vision = processes.load(own, folder / str(world.rank), machine.platform)
            samples = samples_of(loaded.policy, count=2 * world.size, length=32, sampled=8)
            learner = processes.new_learner(own, machine.platform, ranks, loaded.policy, vision)
            assert learner.is_divided is own.train.shard
            losses[name] = [learner.supervise(samples, lr=1e-2) for _ in range(3)]
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if not gap <= LOSS_TOLERANCE:
        raise Failed(f"the loss of {world.size} learners is {gap:.2g} nats from that of one", losses=losses)
    fell = losses["alone"][0] - losses["alone"][-1]
    return {
        "detail": f"{world.size} learners, three steps: {gap:.1e} nats from one process; the loss fell by {fell:.2f}",
        "losses": losses,
        "both_s": round(time.monotonic() - began, 2),
    }
