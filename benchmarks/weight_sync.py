"""How fast new weights reach an engine, beside the bare collective on one flat buffer, and a broadcast a tensor.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.weight_sync [--size 3b] [--bucket-mib 128 256 512]
        [--repeats 9] [--out results.json]

Every process takes a device, and the parameters of a Qwen2.5-VL-3B in bfloat16: tower and layers, tied ones once. What
is timed is `WeightSender.send`: packing, both phases, the checksums of both sides, and the load into the parameters
that the engine reads. In the end the engine's parameters are compared with the learner's, by their sums of bits.
`--size tiny` is for a CPU, where the seconds mean nothing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.setup import SIZES, environment, forget, model, seconds, table, write
from npu_vlrl.hardware import Platform, select
from npu_vlrl.network.messages import Message, Stop
from npu_vlrl.network.world import World, join
from npu_vlrl.sync.buckets import in_place
from npu_vlrl.sync.plan import distinct
from npu_vlrl.sync.weights import WeightReceiver, WeightSender
from npu_vlrl.sync.weights import Weights as Announced

TIMEOUT_S = 300.0
Weights = dict[str, Tensor]


class Bits(Message):
    """A sum of the bits of each tensor that an engine holds."""

    sums: list[int]


def parameters(size: str, device: torch.device) -> Weights:
    built = model(size, device, torch.bfloat16).policy.model
    return distinct({name: parameter.detach() for name, parameter in built.named_parameters()})


def bits(weights: Weights) -> list[int]:
    """The sum of each parameter's bits, read as integers."""
    return [int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in weights.values()]


def send(world: World, platform: Platform, weights: Weights, bucket_mib: int, repeats: int) -> dict[str, Any]:
    """The learner's side of an update, again and again, with other weights each time."""
    sender = WeightSender(world, weights, bucket_mib * 2**20)
    taken: list[float] = []
    for version in range(repeats + 2):
        for tensor in weights.values():
            tensor.neg_()
        platform.synchronize()
        report = sender.send(version)
        taken.append(report.seconds)
    for rank in range(1, world.size):
        world.channel(rank).send(Stop())
        seen = world.channel(rank).expect(Bits, TIMEOUT_S, RuntimeError).sums
        assert seen == bits(weights), f"{world.channel(rank).peer} holds other weights"
    middle = sorted(taken[2:])[repeats // 2]
    return {"name": f"buckets of {bucket_mib} MiB", "bytes": report.bytes_sent, "seconds": middle}


def receive(world: World, weights: Weights) -> None:
    receiver = WeightReceiver(world, in_place(weights))
    while isinstance(message := world.channel(0).receive(), Announced):
        receiver.receive(message)
    world.channel(0).send(Bits(bits(weights)))


def bare(platform: Platform, weights: Weights, repeats: int) -> list[dict[str, Any]]:
    """The collective on one flat buffer, and on each tensor; every process calls it."""
    size = sum(tensor.nbytes for tensor in weights.values())
    flat = torch.zeros(size, dtype=torch.uint8, device=next(iter(weights.values())).device)

    def each() -> None:
        for tensor in weights.values():
            dist.broadcast(tensor, 0)

    one = seconds(lambda: dist.broadcast(flat, 0), platform, repeats, warm_up=2)
    many = seconds(each, platform, repeats, warm_up=2)
    return [
        {"name": "bare, one flat buffer", "bytes": size, "seconds": one},
        {"name": "bare, tensor by tensor", "bytes": size, "seconds": many},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on = select()
    world = join(on, TIMEOUT_S)
    weights = parameters(options.size, on.device(int(os.environ["LOCAL_RANK"])))
    rows = bare(on, weights, options.repeats)
    limit = rows[0]["bytes"] / rows[0]["seconds"]
    for bucket_mib in options.bucket_mib:
        forget(on)
        if world.rank:
            receive(world, weights)
        else:
            rows.append(send(world, on, weights, bucket_mib, options.repeats))
    if world.rank == 0:
        for row in rows:
            speed = row["bytes"] / row["seconds"]
            row |= {"GB_per_s": speed / 1e9, "share_of_bare": speed / limit}
        print(table(rows))
        write(options.out, {**environment(on), "processes": world.size, "tensors": len(weights), "rows": rows})


if __name__ == "__main__":
    main()
