"""Weight synchronisation by files, where no collective reaches the engines, in the same two phases.

The learner writes the changed weights as `<version>.safetensors`, under another name until the file is complete, so a
visible file is always complete. Engines read it into buckets, and answer with the checksums of the buckets.
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
"""Folder of the files in the run folder, during the run."""


class Written(Message):
    """The learner has written a file."""

    file: str


class DiskSender(WeightSender):
    """The learner's side. While it writes, all changed weights are in the memory of the host."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int, folder: Path) -> None:
        """Recreates `folder`, which every engine must see under the same name. Raises what `WeightSender` raises."""
        self.folder = folder.absolute()
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed learner may have left it
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
                    buffer.zero_()  # the padding between tensors is part of the checksum
                    for name, view in buckets.plan.views(number, buffer).items():
                        view.copy_(tensors.get_tensor(name))
                    buckets.sums.take(number, buffer)
                    buckets.load(number)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise SyncError(
                f"cannot read the weights in {file} ({error}); sync.through=disk needs a run.dir that all machines see"
            ) from error
        self._say(buckets.sums.read())
