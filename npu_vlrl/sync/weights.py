"""New weights from the learner to the engines: buckets by broadcast, in two phases.

First every engine takes all buckets into memory of its own, beside its weights, and says the checksum of each. Only
when all have what was sent does the learner say `commit`, and the engines copy. Whoever dies in between, an engine has
either all of the new version or all of the old one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from npu_vlrl.sync.channel import Channel, Message, PeerError
from npu_vlrl.sync.plan import Fact, Plan, distinct, make_plan
from npu_vlrl.sync.world import LEARNER, World

T = TypeVar("T")

WORDS = 64
"""int64 words in a row of the checksum; a bucket is a whole number of rows."""


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
    """The learner's side. Holds two buckets of memory: one is packed while the other is on its way."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int) -> None:
        """`parameters` are the trained ones; what is frozen is equal on both sides from the start.

        Waits for each engine's `WeightReceiver`. Raises SyncError when a parameter is missing there or has another
        shape, or when two engines hold it in different dtypes.
        """
        self.world = world
        self.bucket_bytes = bucket_bytes
        self._parameters = distinct(parameters)
        self._channels = [world.channel(rank) for rank in range(1, world.size)]
        self._facts = self._agree()
        self._sent: dict[str, int] = {}
        """The change counter of each tensor when it was last committed."""
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._version: int | None = None

    def send(self, version: int) -> SyncReport:
        """Brings the engines to `version`: what changed since the last call, once it was sent as a whole.

        A change is what torch counts in a tensor's version counter: every in-place operation, so every optimiser step.
        Raises ValueError for a version below the last one, PeerError when an engine is gone or too slow, and SyncError
        when an engine got other bytes; the engines then still hold the version before.
        """
        if self._version is not None and version < self._version:
            raise ValueError(f"sync: version {version} comes after version {self._version}; versions never fall")
        began = time.monotonic()
        counters = {name: tensor._version for name, tensor in self._parameters.items()}
        changed = tuple(name for name, count in counters.items() if self._sent.get(name) != count)
        plan = self._plan(changed)
        update = {"version": version, "names": changed, "bucket_bytes": self.bucket_bytes, "plan": plan.checksum}
        for channel in self._channels:
            channel.send("weights", update)
        for channel in self._channels:
            _expect(channel, "planned", self.world.timeout_s)
        sums = guarded(lambda: self._broadcast(plan), self.world, self._channels)
        self._compare(sums)
        for channel in self._channels:
            channel.send("commit")
        for channel in self._channels:
            _expect(channel, "committed", self.world.timeout_s)
        self._sent, self._version = counters, version
        return SyncReport(plan.size, len(changed), len(plan.bucket_sizes), time.monotonic() - began)

    def _agree(self) -> dict[str, Fact]:
        """What each parameter looks like on the wire: our shape in the engines' dtype."""
        agreed: dict[str, Fact] = {}
        for channel in self._channels:
            answer = _expect(channel, "parameters", self.world.start_timeout_s)
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

    def _broadcast(self, plan: Plan) -> list[list[int]]:
        """Checksum of each bucket. Packing goes on while the bucket before it travels."""
        device = next(iter(self._parameters.values())).device if self._parameters else torch.device("cpu")
        largest = max(plan.bucket_sizes, default=0)
        buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in plan.bucket_sizes[:2]]
        travelling: list[dist.Work | None] = [None, None]
        sums = []
        for bucket, size in enumerate(plan.bucket_sizes):
            buffer = buffers[bucket % 2][:size]
            before = travelling[bucket % 2]
            if before is not None:
                before.wait()  # the buffer is free again
            views = plan.views(bucket, buffer)
            with torch.no_grad():
                torch._foreach_copy_(list(views.values()), [self._parameters[name].detach() for name in views])
            travelling[bucket % 2] = dist.broadcast(buffer, LEARNER, async_op=True)
            sums.append(checksum(buffer))
        for work in filter(None, travelling):
            work.wait()
        return _numbers(sums)

    def _compare(self, sums: list[list[int]]) -> None:
        """Waits for what every engine got; on a difference all of them drop it."""
        wrong: list[str] = []
        for channel in self._channels:
            theirs = _expect(channel, "staged", self.world.timeout_s).content["sums"]
            bad = [i for i, (ours, got) in enumerate(zip(sums, theirs, strict=True)) if ours != got]
            wrong += [f"bucket {bad[0]} of {len(sums)} of {channel.peer}"] if bad else []
        if wrong:
            for channel in self._channels:
                channel.send("drop")
            raise SyncError(
                f"the weights that arrived are not those that were sent: {', '.join(wrong)}. The engines keep the "
                "version before; check the interconnect"
            )


class WeightReceiver:
    """An engine's side. While an update is on its way, it takes as much memory again as is sent."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor]) -> None:
        """Tells the learner which parameters this engine has: all of them, since it does not know what is trained."""
        self.world = world
        self.version: int | None = None
        self._parameters = dict(parameters)
        self._channel = world.channel(LEARNER)
        facts = [Fact.of(name, tensor).to_json() for name, tensor in self._parameters.items()]
        self._channel.send("parameters", {"facts": facts})

    def receive(self, message: Message) -> int | None:
        """Answers a message of kind "weights". Returns the new version, None when the learner dropped the update.

        Raises SyncError when the two sides plan differently, and PeerError when the learner is gone; the weights are
        then those of the version before.
        """
        update = message.content
        facts = [Fact.of(name, self._parameters[name]) for name in update["names"]]
        plan = make_plan(facts, update["bucket_bytes"])
        if plan.checksum != update["plan"]:
            raise SyncError("learner and engine plan the buckets differently; run the same release on all machines")
        self._channel.send("planned")
        buckets, sums = guarded(lambda: self._take(plan), self.world, [self._channel])
        self._channel.send("staged", {"sums": sums})
        if _expect(self._channel, ("commit", "drop"), self.world.timeout_s).kind == "drop":
            return None
        with torch.no_grad():
            for bucket, buffer in enumerate(buckets):
                views = plan.views(bucket, buffer)
                torch._foreach_copy_([self._parameters[name] for name in views], list(views.values()))
        self.version = int(update["version"])
        self._channel.send("committed")
        return self.version

    def _take(self, plan: Plan) -> tuple[list[Tensor], list[list[int]]]:
        device = next(iter(self._parameters.values())).device
        buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in plan.bucket_sizes]
        works = [dist.broadcast(bucket, LEARNER, async_op=True) for bucket in buckets]
        sums = []
        for bucket, work in zip(buckets, works, strict=True):
            work.wait()
            sums.append(checksum(bucket))
        return buckets, _numbers(sums)


def checksum(bucket: Tensor) -> Tensor:
    """Two numbers, int64 [2], computed where the bucket is: they change with every word and with the words' order."""
    words = bucket.view(torch.int64).view(-1, WORDS)
    return torch.stack([_ranked(words.sum(1)), _ranked(words.sum(0))])


def _ranked(values: Tensor) -> Tensor:
    return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()


def _numbers(sums: list[Tensor]) -> list[list[int]]:
    """On the host, with one wait for the device."""
    return torch.stack(sums).tolist() if sums else []


def guarded(collective: Callable[[], T], world: World, channels: Sequence[Channel]) -> T:
    """Runs a collective, and gives up on it when a peer dies or the time is over.

    A collective of a device waits for a dead process until its own timeout, if ever. It therefore runs in a thread,
    which is left behind in that case; the channels say who is gone.
    """
    result: list[T] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            world.enter_thread()
            result.append(collective())
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=work, daemon=True, name="weights").start()
    deadline = time.monotonic() + world.timeout_s
    world.abandoned = True  # until the collective comes back
    while not done.wait(0.05):
        for channel in channels:
            channel.check_alive()
        if time.monotonic() > deadline:
            raise PeerError(channels[0].peer, f"did not finish a transfer of weights within {world.timeout_s:g} s")
    world.abandoned = False
    if failure:
        for channel in channels:
            channel.check_alive(wait_s=1.0)  # the end of a process says more than the error it causes here
        raise SyncError(f"the transfer of weights failed: {failure[0]}") from failure[0]
    return result[0]


def _expect(channel: Channel, kinds: str | tuple[str, ...], timeout_s: float) -> Message:
    """The next message, which must be of one of these kinds. Raises SyncError with what an engine says went wrong."""
    message = channel.receive(timeout_s)
    if message.kind == "error":
        raise SyncError(f"{channel.peer}: {message.content['message']}")
    assert message.kind in ((kinds,) if isinstance(kinds, str) else kinds), f"{message.kind} instead of {kinds}"
    return message
