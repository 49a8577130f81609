"""The learner's view of the engine processes: one engine whose rounds are shared out among them.

A session stays in one process for life, where its keys and values are, and all members of a group in the same one, so
that their prompt is prefilled once. A new group goes to the process with the fewest open sessions: what each computes
depends on the requests alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from npu_vlrl.rollout.rounds import EngineCounts, EngineError, Outcome, Request, RoundEngine
from npu_vlrl.rollout.wire import RoundWriter, unpack_outcomes
from npu_vlrl.sync.channel import Channel, Message
from npu_vlrl.sync.weights import WeightSender
from npu_vlrl.sync.world import PeerError, World

T = TypeVar("T")


def channels(world: World) -> list[Channel]:
    """The learner's channels to all engines, by rank."""
    return [world.channel(rank) for rank in range(1, world.size)]


def begin(world: World, scratch: Path) -> None:
    """Lets the engine processes load their models; `scratch` is where a `tiny:` model is, or may be written."""
    for channel in channels(world):
        channel.send("begin", {"scratch": str(scratch)})


def stop(world: World) -> None:
    """Lets the engine processes end, those that are still there."""
    for channel in channels(world):
        with suppress(PeerError):
            channel.send("stop")
    world.close()


class RemoteEngine(RoundEngine):
    """See `types.Engine`."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int) -> None:
        """`parameters` are the trained ones of the learner. Waits until every engine process has loaded its model.

        Raises EngineError when one cannot, PeerError when one is gone, and SyncError when its model is another one.
        """
        super().__init__()
        self.links = [_Link(channel, world.timeout_s) for channel in channels(world)]
        for link in self.links:
            link.receive("ready", world.start_timeout_s)
        self._sender = WeightSender(world, parameters, bucket_bytes)
        self._homes: dict[int, _Link] = {}
        """Where each open session is."""

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        shares = self._share(requests)
        answers = await asyncio.gather(*(_in_thread(link.ask(share)) for link, share in shares.items()))
        self.counts = EngineCounts(*map(sum, zip(*(astuple(link.counts) for link in self.links), strict=True)))
        outcomes = {
            request.session: outcome
            for share, answer in zip(shares.values(), answers, strict=True)
            for request, outcome in zip(share, answer, strict=True)
        }
        return [outcomes[request.session] for request in requests]

    def weights_changed(self, version: int) -> dict[str, float]:
        report = self._sender.send(version)
        self.weight_version = version
        return {"sync/bytes": report.bytes_sent, "sync/seconds": report.seconds}

    def forget_features(self) -> None:
        for link in self.links:
            link.channel.send("forget_features")

    def forget_session(self, number: int) -> None:
        link = self._homes.pop(number, None)
        if link is not None:
            link.closed.append(number)

    def _share(self, requests: Sequence[Request]) -> dict[_Link, list[Request]]:
        """The requests of each engine; sessions that are new get a home."""
        load = Counter(self._homes.values())
        together: dict[object, _Link] = {}
        shares: dict[_Link, list[Request]] = {}
        for request in requests:
            home = self._homes.get(request.session)
            if home is None:
                prompt = request.prompt()
                home = together.get(prompt) or min(self.links, key=lambda link: load[link])
                self._homes[request.session] = together[prompt] = home
                load[home] += 1
            shares.setdefault(home, []).append(request)
        return shares


class _Link:
    """One engine process."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self.channel = channel
        self.counts = EngineCounts()
        self.closed: list[int] = []
        """Sessions that it need not keep; told with the next round."""
        self._timeout_s = timeout_s
        self._writer = RoundWriter()

    def ask(self, requests: Sequence[Request]) -> Callable[[], list[Outcome]]:
        """Packs a round; what is returned sends it and waits for the answer."""
        content, blobs = self._writer.pack(requests)
        content["closed"], self.closed = self.closed, []
        return partial(self._play, content, blobs)

    def _play(self, content: dict[str, Any], blobs: list[bytes]) -> list[Outcome]:
        self.channel.send("round", content, blobs)
        answer = self.receive("answers", self._timeout_s)
        self.counts = EngineCounts(*answer.content["counts"])
        return unpack_outcomes(answer, self.channel.peer)

    def receive(self, kind: str, timeout_s: float) -> Message:
        message = self.channel.receive(timeout_s)
        if message.kind == "error":
            raise EngineError(f"{self.channel.peer}: {message.content['message']}")
        assert message.kind == kind, f"{self.channel.peer} sent {message.kind} instead of {kind}"
        return message


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a thread that nothing waits for: when one engine is gone, the run must not wait for another."""
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
