"""Engines of several processes: a round is distributed over the processes that sample.

A session stays in one process, which has its KV cache, and so do all members of a group, so that their prompt is
prefilled once. A new group goes to the process with the fewest open sessions, so the distribution depends on the
requests alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from npu_vlrl.engines.base import EngineCounts, EngineEnded, Outcome, Request, RoundEngine
from npu_vlrl.engines.local import OWN, LocalEngine
from npu_vlrl.engines.messages import (
    Answers,
    ForgetFeatures,
    Pause,
    Probe,
    RequestWriter,
    Round,
    Sleep,
    WeightsChanged,
    unpack_outcomes,
)
from npu_vlrl.network.channel import Channel, M
from npu_vlrl.network.messages import Begin, Ready, Stop
from npu_vlrl.network.world import PeerError, World
from npu_vlrl.sync.files import DiskSender
from npu_vlrl.sync.weights import WeightSender

T = TypeVar("T")


def channels(world: World) -> list[Channel]:
    """The channels of rank 0 to all others, by rank."""
    return [world.channel(rank) for rank in range(1, world.size)]


def begin(world: World, scratch: Path) -> None:
    """Lets the other processes load their models; a `tiny:` model is in `scratch`, or may be written there."""
    for channel in channels(world):
        channel.send(Begin(str(scratch)))


def stop(world: World) -> None:
    """Ends the other processes that are still alive."""
    for channel in channels(world):
        with suppress(PeerError):
            channel.send(Stop())
    world.close()


class SharedEngine(RoundEngine):
    """Engine whose rounds are distributed over processes, see `types.Engine`."""

    def __init__(self, world: World, own: LocalEngine | None = None) -> None:
        """`own` is this process's engine, where it has one. Waits until every other process has loaded its model.

        Raises EngineEnded when one cannot, and PeerError when one is gone.
        """
        super().__init__()
        self.world = world
        others = {channel.peer.rank: Link(channel, world.timeout_s) for channel in channels(world)}
        for link in others.values():
            link.expect(Ready, world.start_timeout_s)
        self.links = [others[rank] for rank in world.engines]
        self._places: list[_Here | Link] = [*([_Here(own)] if own else []), *self.links]
        self._homes: dict[int, _Here | Link] = {}
        """The engine of each open session."""

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        shares = self._share(requests)
        answers = await asyncio.gather(*(place.ask(share) for place, share in shares.items()))
        self._count()
        outcomes = {
            request.session: outcome
            for share, answer in zip(shares.values(), answers, strict=True)
            for request, outcome in zip(share, answer, strict=True)
        }
        return [outcomes[request.session] for request in requests]

    def probe(self, requests: Sequence[Request]) -> dict[str, list[Outcome]]:
        """Samples the probe in all engines. Raises EngineEnded when one failed, and PeerError when one is gone."""
        asked = {place.name: place.probe(requests) for place in self._places}
        return {name: answer() for name, answer in asked.items()}

    def forget_features(self) -> None:
        for place in self._places:
            place.forget_features()

    def forget_session(self, number: int) -> None:
        place = self._homes.pop(number, None)
        if place is not None:
            place.forget_session(number)

    def _count(self) -> None:
        self.counts = EngineCounts(*map(sum, zip(*(astuple(place.counts) for place in self._places), strict=True)))

    def _share(self, requests: Sequence[Request]) -> dict[_Here | Link, list[Request]]:
        """Distributes requests over engines; new sessions are assigned to one."""
        load = Counter(self._homes.values())
        together: dict[object, _Here | Link] = {}
        shares: dict[_Here | Link, list[Request]] = {}
        for request in requests:
            home = self._homes.get(request.session)
            if home is None:
                prompt = request.prompt()
                home = together.get(prompt) or min(self._places, key=lambda place: load[place])
                self._homes[request.session] = together[prompt] = home
                load[home] += 1
            shares.setdefault(home, []).append(request)
        return shares


class RemoteEngine(SharedEngine):
    """Engine of a learner that does not sample itself; its weights are sent to the engine processes."""

    def __init__(
        self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int, folder: Path | None = None
    ) -> None:
        """`parameters` are the trained ones of the learner. With `folder` they are sent by files there.

        Raises the errors of `SharedEngine`, and SyncError when an engine process has another model.
        """
        super().__init__(world)
        if folder is None:
            self._sender = WeightSender(world, parameters, bucket_bytes)
        else:
            self._sender = DiskSender(world, parameters, bucket_bytes, folder)

    def weights_changed(self, version: int) -> dict[str, float]:
        report = self._sender.send(version)
        self.weight_version = version
        return {"sync/bytes": report.bytes_sent, "sync/seconds": report.seconds}


class LearnersEngine(SharedEngine):
    """Engine of processes that all learn and sample: each steps its weights itself, so none are sent."""

    def __init__(self, world: World, own: LocalEngine) -> None:
        """Raises the errors of `SharedEngine`; `own` is the engine of this process."""
        super().__init__(world, own)
        self._own = own

    def weights_changed(self, version: int) -> dict[str, float]:
        for link in self.links:
            link.channel.send(WeightsChanged(version))
        self.weight_version = version
        return self._own.weights_changed(version)

    def sleep(self) -> None:
        for link in self.links:
            link.channel.send(Sleep())
        self._own.sleep()


class _Here:
    """The engine of this process. It samples at the same time as the others, which get their requests first."""

    name = OWN

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.ask = engine.play
        self.forget_features = engine.forget_features
        self.forget_session = engine.forget_session

    def probe(self, requests: Sequence[Request]) -> Callable[[], list[Outcome]]:
        return partial(self._engine.sample_probe, requests)

    @property
    def counts(self) -> EngineCounts:
        return self._engine.counts


class Link:
    """Connection to one engine process."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self.channel = channel
        self.name = str(channel.peer)
        self.counts = EngineCounts()
        self.closed: list[int] = []
        """Sessions that have ended since the last round; the next round lists them."""
        self._timeout_s = timeout_s
        self._writer = RequestWriter()
        self._asked = threading.Event()
        """Event that is set once the last round is sent completely."""
        self._asked.set()

    def ask(self, requests: Sequence[Request]) -> Awaitable[list[Outcome]]:
        """Sends a round at once, in a thread; returns its outcomes as an awaitable."""
        asked, closed, self.closed = self._writer.pack(requests), self.closed, []
        self._asked = threading.Event()
        return in_thread(partial(self._play, Round(asked, closed), self._asked))

    def probe(self, requests: Sequence[Request]) -> Callable[[], list[Outcome]]:
        """Sends a probe at once; returns a function that waits for the answer."""
        self.channel.send(Probe(self._writer.pack(requests)))
        return lambda: unpack_outcomes(self.expect(Answers, self._timeout_s), self.channel.peer)

    def pause(self) -> Awaitable[None]:
        """Interrupts the running round, which is still answered. No other round may be sent meanwhile."""

        def tell() -> None:
            self._asked.wait()
            self.channel.send(Pause())

        return in_thread(tell)

    def forget_features(self) -> None:
        self.channel.send(ForgetFeatures())

    def forget_session(self, number: int) -> None:
        self.closed.append(number)

    def expect(self, kind: type[M], timeout_s: float) -> M:
        """See `Channel.expect`. Raises EngineEnded when the engine failed."""
        return self.channel.expect(kind, timeout_s, EngineEnded)

    def _play(self, message: Round, asked: threading.Event) -> list[Outcome]:
        try:
            self.channel.send(message)
        finally:
            asked.set()
        answers = self.expect(Answers, self._timeout_s)
        self.counts = answers.counts
        return unpack_outcomes(answers, self.channel.peer)


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a daemon thread: when one engine is gone, the run must not wait for another at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True, name="round").start()
    return future
