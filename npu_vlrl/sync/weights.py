"""Weight synchronisation from the learner to the engines: buckets are broadcast, in two phases.

An engine loads a bucket while the next one is in flight, and answers with the checksums of all. The learner commits
only when every engine has the bytes that were sent. Until then an engine holds no version: whichever process dies, no
engine samples from a mixture of two versions.

    learner   weights ->              buckets ->            commit ->
    engine                                       <- staged
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from npu_vlrl.network.channel import PeerError
from npu_vlrl.network.messages import Message
from npu_vlrl.network.world import LEARNER, World
from npu_vlrl.sync.buckets import Buckets, OwnBuckets, WeightTarget, receive_all, send_all
from npu_vlrl.sync.plan import Fact, Plan, distinct, make_plan
from npu_vlrl.sync.transfer import TransferTimeout, guarded

Sums = list[int]
"""Checksums of the buckets, in order."""


class Parameters(Message):
    """Lists the parameters of an engine; sent once."""

    facts: list[Fact]


class Weights(Message):
    """Announces an update. Names and bucket size are set the first time that a plan is used."""

    version: int
    plan: str
    """Checksum of the plan."""
    names: list[str] | None = None
    bucket_bytes: int | None = None


class Staged(Message):
    """An engine has all buckets."""

    sums: Sums


class Decision(Message):
    """Lets the engines commit the update, or drop it."""

    commit: bool


class SyncError(RuntimeError):
    """The two sides do not have the same parameters, or other bytes arrived than were sent; the message names them."""


@dataclass(frozen=True)
class SyncReport:
    """Size and duration of one update."""

    bytes_sent: int
    """Bytes sent to each engine."""
    tensors: int
    buckets: int
    seconds: float


class WeightSender:
    """The learner's side. While it sends, two buckets are in memory: one is packed while the other is in flight."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int) -> None:
        """`parameters` are the trained ones; frozen ones are equal on both sides from the start.

        Waits for each engine's `WeightReceiver`. Raises SyncError when a parameter is missing there or has another
        shape, or when two engines hold it in different dtypes.
        """
        count_optimizer_steps()
        self.world = world
        self.bucket_bytes = bucket_bytes
        self._parameters = distinct(parameters)
        self._channels = [world.channel(rank) for rank in world.engines]
        self._facts = self._agree()
        self._committed: Sequence[int | None] = self._nothing()
        """The version counter of each tensor when the engines last took it."""
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._sent_plans: set[str] = set()
        """Checksums of the plans that the engines know."""
        self._version: int | None = None

    def send(self, version: int) -> SyncReport:
        """Brings the engines to `version`: all parameters the first time, then those that changed.

        Changes are those that torch counts in a tensor's version counter, and every step of an optimiser. Writes
        through `.data` or by a kernel outside torch are not counted; `torch.autograd.graph.increment_version` counts
        them by hand.
        Raises ValueError for a version below the last one, PeerError when an engine is gone or too slow, and SyncError
        when an engine got other bytes; the engines then hold no version until the next update, which sends everything.
        After any other error the connections cannot be used any more.
        """
        if self._version is not None and version < self._version:
            raise ValueError(f"sync: version {version} comes after version {self._version}; versions never fall")
        began = time.monotonic()
        counters = [tensor._version for tensor in self._parameters.values()]
        changed = tuple(
            name for name, count, sent in zip(self._parameters, counters, self._committed, strict=True) if count != sent
        )
        plan = self._plan(changed)
        is_known = plan.checksum in self._sent_plans
        announced = () if is_known else (list(changed), self.bucket_bytes)
        self._tell(Weights(version, plan.checksum, *announced))
        self._sent_plans.add(plan.checksum)
        self._transfer(plan, version)
        self._tell(Decision(commit=True))
        self._committed, self._version = counters, version
        return SyncReport(plan.size, len(changed), len(plan.bucket_sizes), time.monotonic() - began)

    def _nothing(self) -> list[None]:
        return [None] * len(self._parameters)

    def _agree(self) -> dict[str, Fact]:
        """Facts of each parameter as it is sent: our shape in the engines' dtype. Raises SyncError, see `__init__`."""
        agreed: dict[str, Fact] = {}
        for channel in self._channels:
            answer = channel.expect(Parameters, self.world.start_timeout_s, SyncError)
            theirs = {fact.name: fact for fact in answer.facts}
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

    def _tell(self, message: Message) -> None:
        for channel in self._channels:
            channel.send(message)

    def _transfer(self, plan: Plan, version: int) -> None:
        """Sends the buckets, and returns when every engine has them. Raises PeerError or SyncError, see `send`."""
        staged: dict[int, Sums] = {}
        buckets = OwnBuckets(plan, self._parameters)

        def look() -> None:
            for channel in self._channels:
                channel.check_alive()
            for channel in self._channels:
                if channel.peer.rank not in staged and channel.waiting():
                    staged[channel.peer.rank] = channel.expect(Staged, self.world.timeout_s, SyncError).sums

        try:
            sums = guarded(lambda: send_all(buckets, self.world.weights_group), self.world, look, self.world.timeout_s)
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
                staged[channel.peer.rank] = channel.expect(Staged, self.world.timeout_s, SyncError).sums
        self._compare(sums, staged)

    def _compare(self, sums: Sums, staged: Mapping[int, Sums]) -> None:
        """Compares the checksums. On a difference the engines drop the update and hold no version, nothing counts as
        sent, and SyncError is raised.
        """
        wrong: list[str] = []
        for channel in self._channels:
            pairs = zip(sums, staged[channel.peer.rank], strict=True)
            bad = [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs]
            wrong += [f"bucket {bad[0]} of {len(sums)} of {channel.peer}"] if bad else []
        if wrong:
            self._committed = self._nothing()
            self._tell(Decision(commit=False))
            raise SyncError(
                f"the weights that arrived are not those that were sent: {', '.join(wrong)}. The engines hold no "
                "version until the next update; check the interconnect, or the disk with sync.through=disk"
            )


class WeightReceiver:
    """An engine's side."""

    def __init__(self, world: World, holder: WeightTarget) -> None:
        """Sends the learner the list of this engine's parameters."""
        self.world = world
        self.version: int | None = None
        self._holder = holder
        self._facts = {fact.name: fact for fact in holder.facts}
        self._channel = world.channel(LEARNER)
        self._plans: dict[str, Plan] = {}
        # the learner decides what takes too long: it sees every engine, and names the late one
        self._patience_s = 2 * world.timeout_s
        self._channel.send(Parameters(list(holder.facts)))

    def receive(self, message: Weights) -> int | None:
        """Receives an update. Returns the new version, or None when the learner dropped the update.

        Raises SyncError when the two sides plan differently or the transfer fails, and PeerError when the learner is
        gone or gives up. `version` is None from the first bucket until the learner commits.
        """
        buckets = self._holder.new_buckets(self._plan(message))
        self.version = None
        self._fill(buckets)
        if self._channel.expect(Decision, self._patience_s, SyncError).commit:
            buckets.commit()
            self.version = message.version
        return self.version

    def _plan(self, update: Weights) -> Plan:
        if update.names is not None and update.bucket_bytes is not None:
            plan = make_plan([self._facts[name] for name in update.names], update.bucket_bytes)
            if plan.checksum != update.plan:
                raise SyncError("learner and engine plan the buckets differently; run the same release on all machines")
            self._plans[update.plan] = plan
        return self._plans[update.plan]

    def _say(self, sums: Sums) -> None:
        self._channel.send(Staged(sums))

    def _fill(self, buckets: Buckets) -> None:
        """Receives the buckets, and sends the learner their checksums."""

        answered = False

        def fill() -> None:  # answers in this thread: otherwise the learner would wait until the other one wakes up
            nonlocal answered
            sums = receive_all(buckets, self.world.weights_group)
            answered = True
            self._say(sums)

        def look() -> None:
            if not answered and self._channel.waiting():  # a message after that is the decision
                self._channel.check_alive()
                raise PeerError(self._channel.peer, "gave up in the middle of an update of the weights")

        try:
            guarded(fill, self.world, look, self._patience_s)
        except TransferTimeout:
            what = f"did not finish a transfer of weights within {self._patience_s:g} s"
            raise PeerError(self._channel.peer, what) from None
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            raise SyncError(f"the transfer of weights failed: {error}") from error


@cache
def count_optimizer_steps() -> RemovableHandle:
    """Lets steps of all optimisers increase the version counters of their parameters.

    Fused optimisers write without counting, and on some devices so do optimisers over lists of tensors.
    """

    def count(optimizer: Optimizer, arguments: tuple[object, ...], options: dict[str, object]) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)

    return register_optimizer_step_post_hook(count)
