"""One process of a test of weights by files: `python -m tests.sync.disk_actor FOLDER`; each writes what it saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from npu_vlrl.hardware import select
from npu_vlrl.network.messages import Failed, Stop
from npu_vlrl.network.world import World, join
from npu_vlrl.sync import files as disk
from npu_vlrl.sync.buckets import in_place
from npu_vlrl.sync.files import DiskReceiver, DiskSender
from npu_vlrl.sync.weights import SyncError, Weights

SHAPES = {"a": (300, 7), "b": (5,), "c": (64, 64), "frozen": (3, 3)}
BUCKET_BYTES = 4096


def parameters(value: float) -> dict[str, torch.Tensor]:
    """Distinct numbers, so that a tensor in another's place is noticed."""
    return {
        name: torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * value + number
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}


def learner(world: World, folder: Path) -> list[Any]:
    own = parameters(0.5)
    sender = DiskSender(world, {name: own[name] for name in "abc"}, BUCKET_BYTES, folder / "weights")
    seen: list[Any] = []

    def update(version: int) -> None:
        try:
            report = sender.send(version)
            outcome: Any = [report.tensors, report.bytes_sent]
        except SyncError as error:
            outcome = str(error)
        seen.append([outcome, sums(own), sorted(file.name for file in sender.folder.iterdir())])

    update(1)
    own["c"].mul_(3)
    update(2)
    own["a"].mul_(2)
    with_damage(flip_a_bit, update, 3)
    update(4)  # what was dropped is sent again
    own["b"].add_(1)
    with_damage(lambda file: file.write_bytes(file.read_bytes()[:-4]), update, 5)
    world.channel(1).send(Stop())
    return seen


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def with_damage(damage: Callable[[Path], object], update: Callable[[int], None], version: int) -> None:
    save = disk.save_file

    def damaged(tensors: dict[str, torch.Tensor], file: Path) -> None:
        save(tensors, file)
        damage(file)

    disk.save_file = damaged
    update(version)
    disk.save_file = save


def engine(world: World) -> list[Any]:
    own = parameters(7.0)
    channel = world.channel(0)
    receiver = DiskReceiver(world, in_place(own))
    seen: list[Any] = []
    while isinstance(message := channel.receive(), Weights):
        try:
            version = receiver.receive(message)
        except SyncError as error:
            channel.send(Failed(str(error)))
            version = None
        seen.append([version, sums(own)])
    return seen


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = join(select(), 30.0)
    seen = engine(world) if world.rank else learner(world, folder)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(seen))
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
