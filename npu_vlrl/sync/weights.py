"""New weights from the learner to the engines: buckets by broadcast, in two phases.

First every engine takes all buckets into memory of its own, beside its weights, and says the checksum of each. Only
when all have what was sent does the learner say `commit`, and the engines copy. Whoever dies in between, an engine has
either all of the new version or all of the old one.

    learner   weights ->              buckets ->            commit ->
    engine               <- planned              <- staged            <- committed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from npu_vlrl.sync.channel import Channel, Message, PeerError
from npu_vlrl.sync.plan import Fact, Plan, distinct, make_plan
from npu_vlrl.sync.transfer import TransferTimeout, checksum, guarded
from npu_vlrl.sync.world import LEARNER, World

Sums = list[list[int]]
"""The two numbers of each bucket's checksum."""


class SyncError(RuntimeError):
    """The two sides do not hold the same parameters, or what came is not what was sent; the message names it."""


@dataclass(frozen=True)
class SyncReport:
    """What one update came to."""

    bytes_sent: int
    """To each engine."""
    tensors: int
    buckets: int
    seconds: float


class WeightSender:
    """The learner's side. While it sends it holds two buckets: one is packed while the other is on its way."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int) -> None:
        """`parameters` are the trained ones; what is frozen is equal on both sides from the start.

        Waits for each engine's `WeightReceiver`. Raises SyncError when a parameter is missing there or has another
        shape, or when two engines hold it in different dtypes.
        """
        count_optimizer_steps()
        self.world = world
        self.bucket_bytes = bucket_bytes
        self._parameters = distinct(parameters)
        self._channels = [world.channel(rank) for rank in range(1, world.size)]
        self._facts = self._agree()
        self._committed: dict[str, int] = {}
        """The version counter of each tensor when the engines last took it."""
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._version: int | None = None

    def send(self, version: int) -> SyncReport:
        """Brings the engines to `version`: all parameters the first time, then those that changed.

        A change is what torch counts in a tensor's version counter, and every step of an optimiser. Not counted is what
        is written through `.data` or by a kernel that torch knows nothing of; `torch.autograd.graph.increment_version`
        counts it by hand.
        Raises ValueError for a version below the last one, PeerError when an engine is gone or too slow, and SyncError
        when an engine got other bytes; the engines then still hold the version before. After any other error than of
        wrong bytes the connections are of no more use.
        """
        if self._version is not None and version < self._version:
            raise ValueError(f"sync: version {version} comes after version {self._version}; versions never fall")
        began = time.monotonic()
        counters = {name: tensor._version for name, tensor in self._parameters.items()}
        changed = tuple(name for name, count in counters.items() if self._committed.get(name) != count)
        plan = self._plan(changed)
        update = {"version": version, "names": changed, "bucket_bytes": self.bucket_bytes, "plan": plan.checksum}
        self._tell("weights", update)
        for channel in self._channels:
            expect(channel, "planned", self.world.timeout_s)
        self._transfer(plan, version)
        self._tell("commit")
        for channel in self._channels:
            expect(channel, "committed", self.world.timeout_s)
        self._committed, self._version = counters, version
        return SyncReport(plan.size, len(changed), len(plan.bucket_sizes), time.monotonic() - began)

    def _agree(self) -> dict[str, Fact]:
        """What each parameter looks like on the wire: our shape in the engines' dtype."""
        agreed: dict[str, Fact] = {}
        for channel in self._channels:
            answer = expect(channel, "parameters", self.world.start_timeout_s)
            theirs = {fact.name: fact for fact in map(Fact.from_json, answer.content["facts"])}
            for name, tensor in self._parameters.items():
                ours, found = Fact.of(name, tensor), theirs.get(name)
                if found is None or found.shape != ours.shape:
                    there = "is missing" if found is None else f"has the shape {list(found.shape)}"
                    raise SyncError(
                        f"parameter {name} has the shape {list(ours.shape)} here and {there} in {channel.peer}; start "
                        "all processes with the same model.path and the same model.lora"
                    )
                if agreed.setdefault(name, found) != found:
                    raise SyncError(
                        f"parameter {name} is {found.dtype} in {channel.peer} and {agreed[name].dtype} in another "
                        "engine; one broadcast serves all, so give them the same model.dtype"
                    )
        return agreed

    def _plan(self, names: tuple[str, ...]) -> Plan:
        if names not in self._plans:
            self._plans[names] = make_plan([self._facts[name] for name in names], self.bucket_bytes)
        return self._plans[names]

    def _tell(self, kind: str, content: dict | None = None) -> None:
        for channel in self._channels:
            channel.send(kind, content)

    def _transfer(self, plan: Plan, version: int) -> None:
        """Sends the buckets, and returns when every engine has them. Raises PeerError or SyncError, see `send`."""
        staged: dict[int, Sums] = {}

        def look() -> None:
            for channel in self._channels:
                channel.check_alive()
            for channel in self._channels:
                if channel.peer.rank not in staged and channel.waiting():
                    staged[channel.peer.rank] = expect(channel, "staged", self.world.timeout_s).content["sums"]

        try:
            sums = guarded(lambda: self._broadcast(plan), self.world, look, self.world.timeout_s)
        except TransferTimeout:
            late = [channel.peer for channel in self._channels if channel.peer.rank not in staged]
            others = f"; neither did {', '.join(map(str, late[1:]))}" if late[1:] else ""
            what = f"did not take the weights within sync.timeout_s={self.world.timeout_s:g}{others}"
            raise PeerError(late[0] if late else self._channels[0].peer, what) from None
        except RuntimeError as error:
            if isinstance(error, (PeerError, SyncError)):
                raise
            raise SyncError(f"the transfer of weights failed: {error}") from error
        for channel in self._channels:
            if channel.peer.rank not in staged:
                staged[channel.peer.rank] = expect(channel, "staged", self.world.timeout_s).content["sums"]
        self._compare(sums, staged)

    def _broadcast(self, plan: Plan) -> Sums:
        """Packing goes on while the bucket before it travels; a bucket travels while its checksum is made."""
        if not plan.places:
            return []
        device = self._parameters[plan.places[0].fact.name].device
        largest = max(plan.bucket_sizes)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in plan.bucket_sizes[:2]]
        works: list[dist.Work] = []
        sums: list[Tensor] = []
        for bucket, size in enumerate(plan.bucket_sizes):
            buffer = buffers[bucket % 2][:size]
            if bucket >= 2:
                works[bucket - 2].wait()  # the buffer is free again
            views = plan.views(bucket, buffer)
            with torch.no_grad():
                torch._foreach_copy_(list(views.values()), [self._parameters[name].detach() for name in views])
            works.append(dist.broadcast(buffer, LEARNER, async_op=True))
            sums.append(checksum(buffer))
        for work in works[-2:]:
            work.wait()
        return torch.stack(sums).tolist()

    def _compare(self, sums: Sums, staged: Mapping[int, Sums]) -> None:
        """On a difference all engines drop what they got."""
        wrong: list[str] = []
        for channel in self._channels:
            pairs = zip(sums, staged[channel.peer.rank], strict=True)
            bad = [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs]
            wrong += [f"bucket {bad[0]} of {len(sums)} of {channel.peer}"] if bad else []
        if wrong:
            self._tell("drop")
            raise SyncError(
                f"the weights that arrived are not those that were sent: {', '.join(wrong)}. The engines keep the "
                "version before; check the interconnect, or the disk with sync.through=disk"
            )


@dataclass(frozen=True)
class Holder:
    """What an engine holds, and how it takes new weights."""

    facts: tuple[Fact, ...]
    """All its parameters, since it does not know which are trained."""
    room: Callable[[int], Tensor]
    """Memory for a bucket of so many bytes: uint8, on the device that the collective writes to."""
    take: Callable[[Plan, Sequence[Tensor]], None]
    """Copies what lies in the buckets into the weights."""


def in_place(parameters: Mapping[str, Tensor]) -> Holder:
    """Of an engine whose parameters are tensors of this process."""
    devices = {tensor.device for tensor in parameters.values()}

    def room(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=next(iter(devices)))

    @torch.no_grad()
    def take(plan: Plan, buckets: Sequence[Tensor]) -> None:
        for number, bucket in enumerate(buckets):
            views = plan.views(number, bucket)
            torch._foreach_copy_([parameters[name] for name in views], list(views.values()))

    return Holder(tuple(Fact.of(name, tensor) for name, tensor in parameters.items()), room, take)


class WeightReceiver:
    """An engine's side. While an update is on its way, it takes as much memory again as is sent."""

    def __init__(self, world: World, holder: Holder) -> None:
        """Tells the learner which parameters this engine has."""
        self.world = world
        self.version: int | None = None
        self._holder = holder
        self._facts = {fact.name: fact for fact in holder.facts}
        self._channel = world.channel(LEARNER)
        # the learner is the judge of what takes too long: it knows every engine, and says which one is late
        self._patience_s = 2 * world.timeout_s
        self._channel.send("parameters", {"facts": [fact.to_json() for fact in holder.facts]})

    def receive(self, message: Message) -> int | None:
        """Answers a message of kind "weights". Returns the new version, None when the learner dropped the update.

        Raises SyncError when the two sides plan differently or the transfer fails, and PeerError when the learner is
        gone or gives up; the weights are then those of the version before.
        """
        update = message.content
        plan = make_plan([self._facts[name] for name in update["names"]], update["bucket_bytes"])
        if plan.checksum != update["plan"]:
            raise SyncError("learner and engine plan the buckets differently; run the same release on all machines")
        buckets = self._room(plan)
        self._channel.send("planned")
        self._channel.send("staged", {"sums": self._stage(plan, buckets)})
        if expect(self._channel, ("commit", "drop"), self._patience_s).kind == "drop":
            return None
        self._holder.take(plan, buckets)
        self.version = int(update["version"])
        self._channel.send("committed")
        return self.version

    def _room(self, plan: Plan) -> list[Tensor]:
        """Taken before the learner begins: a lack of memory is told to it, and nobody waits in a collective."""
        return [self._holder.room(size) for size in plan.bucket_sizes]

    def _stage(self, plan: Plan, buckets: Sequence[Tensor]) -> Sums:
        """Fills the buckets; returns their checksums."""

        def look() -> None:
            if self._channel.waiting():
                self._channel.check_alive()
                raise PeerError(self._channel.peer, "gave up in the middle of an update of the weights")

        try:
            return guarded(lambda: self._collect(buckets), self.world, look, self._patience_s)
        except TransferTimeout:
            what = f"did not finish a transfer of weights within {self._patience_s:g} s"
            raise PeerError(self._channel.peer, what) from None
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise SyncError(f"the transfer of weights failed: {error}") from error

    def _collect(self, buckets: Sequence[Tensor]) -> Sums:
        works = [dist.broadcast(bucket, LEARNER, async_op=True) for bucket in buckets]
        sums = []
        for work, bucket in zip(works, buckets, strict=True):
            work.wait()
            sums.append(checksum(bucket))
        return torch.stack(sums).tolist() if sums else []


@cache
def count_optimizer_steps() -> RemovableHandle:
    """Makes the step of any optimiser show in the version counters of its parameters.

    Fused optimisers write without counting, and on some devices so do those that work on lists of tensors.
    """

    def count(optimizer: Optimizer, arguments: tuple, options: dict) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)

    return register_optimizer_step_post_hook(count)


def expect(channel: Channel, kinds: str | tuple[str, ...], timeout_s: float) -> Message:
    """The next message, which must be of one of these kinds. Raises SyncError with what an engine says went wrong."""
    message = channel.receive(timeout_s)
    if message.kind == "error":
        raise SyncError(f"{channel.peer}: {message.content['message']}")
    if message.kind == "stop":
        raise PeerError(channel.peer, "gave up in the middle of an update of the weights")
    assert message.kind in ((kinds,) if isinstance(kinds, str) else kinds), f"{message.kind} instead of {kinds}"
    return message
