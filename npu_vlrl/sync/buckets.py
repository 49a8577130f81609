"""Buckets: the memory through which weights are transferred, and the overlap of packing, transfer and loading."""

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
        """Processes a bucket that has arrived."""

    @abstractmethod
    def commit(self) -> None:
        """Takes the update, once all buckets have arrived and all engines have the same."""

    def let_collective_start(self) -> None:
        """Lets the next collective, which waits for the same bucket, start before the operations that follow.

        Behind a large operation it would wait for free resources of the device; four tiny operations take long enough.
        """
        for _ in range(4):
            self._pause.zero_()


class OwnBuckets(Buckets):
    """Buckets of parameters of this process. Two are in memory: one is in flight, the other is packed or loaded.

    A parameter that fills a bucket is sent from and received into its own memory.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, Tensor]) -> None:
        device = parameters[plan.places[0].fact.name].device if plan.places else None
        super().__init__(plan, device)
        self._parameters = parameters
        self._direct = {bucket: own for bucket in range(self.count) if (own := self._filling(bucket)) is not None}
        """Memory of the parameters that fill a bucket, by bucket."""
        shared = [size for bucket, size in enumerate(plan.bucket_sizes) if bucket not in self._direct]
        self._buffers = [torch.empty(max(shared), dtype=torch.uint8, device=device) for _ in range(2 if shared else 0)]

    def buffer(self, bucket: int) -> Tensor:
        if bucket in self._direct:
            return self._direct[bucket]
        return self._buffers[bucket % 2][: self.plan.bucket_sizes[bucket]]

    @torch.no_grad()
    def pack(self, bucket: int) -> None:
        if bucket not in self._direct:
            views, own = self._both(bucket)
            torch._foreach_copy_(views, own)

    @torch.no_grad()
    def load(self, bucket: int) -> None:
        if bucket not in self._direct:
            views, own = self._both(bucket)
            torch._foreach_copy_(own, views)

    def commit(self) -> None:
        """Does nothing: the buckets are loaded already."""

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
    """Buckets of weights in another process: all buckets are staged until the commit, and copied from there then."""

    def __init__(
        self, plan: Plan, allocate: Callable[[int], Tensor], copy: Callable[[Plan, Sequence[Tensor]], None]
    ) -> None:
        self._staged = [allocate(size) for size in plan.bucket_sizes]
        self._copy = copy
        super().__init__(plan, self._staged[0].device if self._staged else None)

    def buffer(self, bucket: int) -> Tensor:
        return self._staged[bucket]

    def load(self, bucket: int) -> None:
        """Does nothing: the weights are copied at the commit."""

    def commit(self) -> None:
        self._copy(self.plan, self._staged)


@dataclass(frozen=True)
class WeightTarget:
    """The parameters of an engine, and the buckets by which it takes new weights."""

    facts: tuple[Fact, ...]
    """All parameters of the engine, since it does not know which are trained."""
    new_buckets: Callable[[Plan], Buckets]
    """Allocates the buckets of an update."""


def in_place(parameters: Mapping[str, Tensor]) -> WeightTarget:
    """Target of an engine whose parameters are tensors of this process."""
    facts = tuple(Fact.of(name, tensor) for name, tensor in parameters.items())
    return WeightTarget(facts, lambda plan: OwnBuckets(plan, parameters))


def staged(
    facts: Sequence[Fact], allocate: Callable[[int], Tensor], copy: Callable[[Plan, Sequence[Tensor]], None]
) -> WeightTarget:
    """Target of an engine whose weights are in other processes. `allocate` makes memory, uint8 [bytes], that the
    collective can write to, and `copy` copies from it before it returns.
    """
    return WeightTarget(tuple(facts), lambda plan: StagedBuckets(plan, allocate, copy))


def send_all(buckets: OwnBuckets, group: dist.ProcessGroup | None) -> list[int]:
    """Sends all buckets; returns their checksums. Packing overlaps the transfer of the bucket before, and the checksum
    of a bucket its transfer.
    """
    works: list[dist.Work] = []
    for bucket in range(buckets.count):
        if bucket >= 2:
            works[bucket - 2].wait()  # the buffer is free again
            buckets.let_collective_start()
        buckets.pack(bucket)
        works.append(dist.broadcast(buckets.buffer(bucket), LEARNER, group=group, async_op=True))
        buckets.sums.take(bucket, buckets.buffer(bucket))
    for work in works[-2:]:
        work.wait()
    return buckets.sums.read()


def receive_all(buckets: Buckets, group: dist.ProcessGroup | None) -> list[int]:
    """Receives all buckets; returns their checksums. A bucket is loaded during the transfer of the next one."""
    works: list[dist.Work] = []
    for bucket in range(buckets.count):
        for ahead in range(len(works), min(bucket + 2, buckets.count)):
            works.append(dist.broadcast(buckets.buffer(ahead), LEARNER, group=group, async_op=True))
        works[bucket].wait()
        buckets.let_collective_start()
        buckets.sums.take(bucket, buckets.buffer(bucket))
        buckets.load(bucket)
    return buckets.sums.read()
