"""New weights by way of files, where no collective reaches the engines: the two phases are the same.

The learner writes what changed as `<version>.safetensors` under a name of its own, and renames it when it is whole; so
whoever sees the file sees all of it. Engines read it into buckets, and say the checksums of what they read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from npu_vlrl.common.atomic_files import writing
from npu_vlrl.network.messages import Message
from npu_vlrl.network.world import World
from npu_vlrl.sync.buckets import Buckets
from npu_vlrl.sync.plan import Plan
from npu_vlrl.sync.transfer import Checksums
from npu_vlrl.sync.weights import Staged, SyncError, WeightReceiver, WeightSender

FOLDER = "weights"
"""In the run folder, as long as the run goes on."""


class Written(Message):
    """The learner has written a file."""

    file: str


class DiskSender(WeightSender):
    """The learner's side. While it writes it holds all that changed in the memory of the host."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int, folder: Path) -> None:
        """`folder` is made anew; every engine must see it under the same name. Raises what `WeightSender` raises."""
        self.folder = folder.absolute()
        shutil.rmtree(self.folder, ignore_errors=True)  # of a learner that was killed
        self.folder.mkdir(parents=True)
        super().__init__(world, parameters, bucket_bytes)

    def _transfer(self, plan: Plan, version: int) -> None:
        sums = Checksums(len(plan.bucket_sizes), None)
        tensors: dict[str, Tensor] = {}
        for number, size in enumerate(plan.bucket_sizes):
            bucket = torch.zeros(size, dtype=torch.uint8)
            for name, view in plan.views(number, bucket).items():
                tensors[name] = view.copy_(self._parameters[name].detach())
            sums.take(number, bucket)
        file = self.folder / f"{version}.safetensors"
        unfinished = file.with_suffix(".unfinished")
        with writing(unfinished):
            save_file(tensors, unfinished)
        unfinished.replace(file)
        for old in self.folder.glob("*.safetensors"):
            if old != file:
                old.unlink()
        self._tell(Written(str(file)))
        answers = {c.peer.rank: c.expect(Staged, self.world.timeout_s, SyncError) for c in self._channels}
        self._compare(sums.read(), {rank: answer.sums for rank, answer in answers.items()})


class DiskReceiver(WeightReceiver):
    """An engine's side."""

    def _fill(self, buckets: Buckets) -> None:
        file = Path(self._channel.expect(Written, self._patience_s, SyncError).file)
        try:
            with safe_open(file, "pt") as tensors:
                for number in range(buckets.count):
                    buffer = buckets.buffer(number)
                    buffer.zero_()  # what is between tensors counts in the checksum
                    for name, view in buckets.plan.views(number, buffer).items():
                        view.copy_(tensors.get_tensor(name))
                    buckets.sums.take(number, buffer)
                    buckets.load(number)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise SyncError(
                f"cannot read the weights in {file} ({error}); sync.through=disk needs a run.dir that all machines see"
            ) from error
        self._say(buckets.sums.read())
