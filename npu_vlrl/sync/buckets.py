"""The memory that weights travel through, bucket by bucket, and what each side does while one is on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from npu_vlrl.network.world import LEARNER
from npu_vlrl.sync.plan import Fact, Plan
from npu_vlrl.sync.transfer import Checksums


class Buckets(ABC):
    """The buckets of one update on one side, and their checksums."""

    def __init__(self, plan: Plan, device: torch.device | None) -> None:
        self.plan = plan
        self.count = len(plan.bucket_sizes)
        self.sums = Checksums(self.count, device)
        self._pause = torch.zeros(1, device=device)

    @abstractmethod
    def buffer(self, bucket: int) -> Tensor:
        """uint8 [size of the bucket]; another bucket may have the same memory two later."""

    @abstractmethod
    def load(self, bucket: int) -> None:
        """What to do with a bucket that has arrived."""

    @abstractmethod
    def commit(self) -> None:
        """All have arrived, and all engines have the same."""

    def step_aside(self) -> None:
        """Lets the collective begin that waits for the same bucket to arrive.

        Behind a large operation it would wait until the device has room for it; four tiny ones take long enough.
        """
        for _ in range(4):
            self._pause.zero_()


class OwnBuckets(Buckets):
    """Of parameters of this process. There is memory for two buckets: one travels, the other is packed or loaded.

    A parameter that fills a bucket travels from and into its own memory.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, Tensor]) -> None:
        device = parameters[plan.places[0].fact.name].device if plan.places else None
        super().__init__(plan, device)
        self._parameters = parameters
        self._whole = {bucket: own for bucket in range(self.count) if (own := self._filling(bucket)) is not None}
        shared = [size for bucket, size in enumerate(plan.bucket_sizes) if bucket not in self._whole]
        self._buffers = [torch.empty(max(shared), dtype=torch.uint8, device=device) for _ in range(2 if shared else 0)]

    def buffer(self, bucket: int) -> Tensor:
        if bucket in self._whole:
            return self._whole[bucket]
        return self._buffers[bucket % 2][: self.plan.bucket_sizes[bucket]]

    @torch.no_grad()
    def pack(self, bucket: int) -> None:
        if bucket not in self._whole:
            views, own = self._both(bucket)
            torch._foreach_copy_(views, own)

    @torch.no_grad()
    def load(self, bucket: int) -> None:
        if bucket not in self._whole:
            views, own = self._both(bucket)
            torch._foreach_copy_(own, views)

    def commit(self) -> None:
        """They are loaded already."""

    def _filling(self, bucket: int) -> Tensor | None:
        """The memory of the parameter that fills a bucket, if one does."""
        places = self.plan.buckets[bucket]
        if len(places) > 1:
            return None
        fact = places[0].fact
        own = self._parameters[fact.name].detach()
        fits = own.dtype == fact.torch_dtype and own.nbytes == self.plan.bucket_sizes[bucket]
        return own.view(-1).view(torch.uint8) if fits and own.is_contiguous() else None

    def _both(self, bucket: int) -> tuple[list[Tensor], list[Tensor]]:
        views = self.plan.views(bucket, self.buffer(bucket))
        return list(views.values()), [self._parameters[name].detach() for name in views]


class StagedBuckets(Buckets):
    """Of weights that others hold: all buckets are kept until the commit, and handed over then."""

    def __init__(
        self, plan: Plan, room: Callable[[int], Tensor], take: Callable[[Plan, Sequence[Tensor]], None]
    ) -> None:
        self._kept = [room(size) for size in plan.bucket_sizes]
        self._take = take
        super().__init__(plan, self._kept[0].device if self._kept else None)

    def buffer(self, bucket: int) -> Tensor:
        return self._kept[bucket]

    def load(self, bucket: int) -> None:
        """Not before the commit."""

    def commit(self) -> None:
        self._take(self.plan, self._kept)


@dataclass(frozen=True)
class WeightTarget:
    """What an engine holds, and how it takes new weights."""

    facts: tuple[Fact, ...]
    """All its parameters, since it does not know which are trained."""
    new_buckets: Callable[[Plan], Buckets]
    """Takes the memory for an update."""


def in_place(parameters: Mapping[str, Tensor]) -> WeightTarget:
    """Of an engine whose parameters are tensors of this process."""
    facts = tuple(Fact.of(name, tensor) for name, tensor in parameters.items())
    return WeightTarget(facts, lambda plan: OwnBuckets(plan, parameters))


def handed_over(
    facts: Sequence[Fact], room: Callable[[int], Tensor], take: Callable[[Plan, Sequence[Tensor]], None]
) -> WeightTarget:
    """Of an engine whose weights are elsewhere. `room` makes memory, uint8 [bytes], where the collective can write, and
    `take` copies from it, before it returns.
    """
    return WeightTarget(tuple(facts), lambda plan: StagedBuckets(plan, room, take))


def send_all(buckets: OwnBuckets, group: dist.ProcessGroup | None) -> list[int]:
    """Packing goes on while the bucket before it travels; a bucket travels while its checksum is made."""
    works: list[dist.Work] = []
    for bucket in range(buckets.count):
        if bucket >= 2:
            works[bucket - 2].wait()  # the buffer is free again
            buckets.step_aside()
        buckets.pack(bucket)
        works.append(dist.broadcast(buckets.buffer(bucket), LEARNER, group=group, async_op=True))
        buckets.sums.take(bucket, buckets.buffer(bucket))
    for work in works[-2:]:
        work.wait()
    return buckets.sums.read()


def receive_all(buckets: Buckets, group: dist.ProcessGroup | None) -> list[int]:
    """Loads a bucket while the next one travels."""
    works: list[dist.Work] = []
    for bucket in range(buckets.count):
        for ahead in range(len(works), min(bucket + 2, buckets.count)):
            works.append(dist.broadcast(buckets.buffer(ahead), LEARNER, group=group, async_op=True))
        works[bucket].wait()
        buckets.step_aside()
        buckets.sums.take(bucket, buckets.buffer(bucket))
        buckets.load(bucket)
    return buckets.sums.read()
