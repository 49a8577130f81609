"""How fast new weights reach an engine, beside the bare collective on one flat buffer of the same size.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.weight_sync [--gib 6] [--bucket-mib 256] [--repeat 5]

Every process takes a device. The parameters have the shapes of a 3B language model's layers, in bfloat16, repeated
until there are as many bytes as asked for. What is timed is `WeightSender.send`: packing, both phases, checksums on
both sides, and the engine's copy into its parameters. Rank 0 prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from npu_vlrl.hardware import Platform, select
from npu_vlrl.sync.weights import SyncReport, WeightReceiver, WeightSender, in_place
from npu_vlrl.sync.world import World, join

LAYER = {
    "q": (2048, 2048),
    "k": (256, 2048),
    "v": (256, 2048),
    "o": (2048, 2048),
    "gate": (11008, 2048),
    "up": (11008, 2048),
    "down": (2048, 11008),
    "norm": (2048,),
}


def parameters(total: float, device: torch.device) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    size = 0
    while size < total:
        for name, shape in LAYER.items():
            tensor = torch.ones(shape, dtype=torch.bfloat16, device=device)
            found[f"layers.{len(found) // len(LAYER)}.{name}"] = tensor
            size += tensor.numel() * 2
    return found


def timed(
    work: Callable[[], object], platform: Platform, repeat: int, before: Callable[[], object] = lambda: None
) -> float:
    """The median of some calls after one to warm up, in seconds; what `before` does each time is not counted."""
    seconds = []
    for _ in range(repeat + 1):
        before()
        platform.synchronize()
        began = time.perf_counter()
        work()
        platform.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[repeat // 2]


def learner(world: World, platform: Platform, weights: dict[str, torch.Tensor], options: argparse.Namespace) -> None:
    sender = WeightSender(world, weights, options.bucket_mib * 2**20)
    reports: list[SyncReport] = []
    seconds = timed(
        lambda: reports.append(sender.send(len(reports))),
        platform,
        options.repeat,
        before=lambda: [tensor.add_(1) for tensor in weights.values()],
    )
    size = reports[-1].bytes_sent
    for rank in range(1, world.size):
        world.channel(rank).send("stop")
    flat = torch.ones(size, dtype=torch.uint8, device=next(iter(weights.values())).device)
    raw = timed(lambda: dist.broadcast(flat, 0), platform, options.repeat)
    print(
        json.dumps(
            {
                "device": platform.device_name(0),
                "processes": world.size,
                "bytes": size,
                "tensors": len(weights),
                "bucket_mib": options.bucket_mib,
                "send_seconds": seconds,
                "send_GB_per_s": size / seconds / 1e9,
                "bare_broadcast_seconds": raw,
                "bare_GB_per_s": size / raw / 1e9,
                "share_of_bare": raw / seconds,
            }
        )
    )


def engine(world: World, platform: Platform, weights: dict[str, torch.Tensor], options: argparse.Namespace) -> None:
    receiver = WeightReceiver(world, in_place(weights))
    while (message := world.channel(0).receive()).kind == "weights":
        receiver.receive(message)
    total = sum(-(-tensor.numel() * 2 // 512) * 512 for tensor in weights.values())
    flat = torch.ones(total, dtype=torch.uint8, device=next(iter(weights.values())).device)
    timed(lambda: dist.broadcast(flat, 0), platform, options.repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    platform = select()
    world = join(platform, 120.0)
    weights = parameters(options.gib * 2**30, platform.device(int(os.environ["LOCAL_RANK"])))
    (engine if world.rank else learner)(world, platform, weights, options)


if __name__ == "__main__":
    main()
