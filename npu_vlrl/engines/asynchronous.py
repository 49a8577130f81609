"""The asynchronous engine: each engine process samples a round of the queued requests as soon as it is idle.

A slow judge or tool then delays only its own episode, and the content of a round depends on timing. New weights do not
wait for turns to end: rounds are interrupted, the engines take the weights, and the sessions request the rest of their
turns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from npu_vlrl.engines.base import Check, Outcome, Request, no_check, settle
from npu_vlrl.engines.remote import Link, RemoteEngine, in_thread
from npu_vlrl.network.world import World
from npu_vlrl.types import Generation

Asked = tuple[Request, asyncio.Future[Generation]]


class AsyncEngine(RemoteEngine):
    """See `types.Engine`."""

    def __init__(
        self, world: World, parameters: Mapping[str, Tensor], bucket_bytes: int, folder: Path | None = None
    ) -> None:
        """See `RemoteEngine`."""
        super().__init__(world, parameters, bucket_bytes, folder)
        self._arrived: list[Asked] = []
        """Requests since the last iteration of the event loop. Members of a group arrive together, and are assigned to
        the same engine."""
        self._queues: dict[Link, list[Asked]] = defaultdict(list)
        self._playing: dict[Link, asyncio.Task[None]] = {}
        self._held = False
        """Whether no round may begin."""

    async def ask(self, request: Request) -> Generation:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Generation] = loop.create_future()
        if not self._arrived:
            loop.call_soon(self._place)
        self._arrived.append((request, answer))
        return await answer

    def close_session(self, number: int) -> None:
        if number in self._open:
            self._open.discard(number)
            self.forget_session(number)

    async def update(self, version: int, check: Check = no_check) -> dict[str, float]:
        """Interrupts the rounds and transfers new weights. Raises the errors of `weights_changed` and `check`."""
        self._held = True
        try:
            await self.rest()
            return await in_thread(partial(self._update, version, check))
        finally:
            self._held = False
            for link in self.links:
                self._start(link)

    async def rest(self) -> None:
        """Interrupts the rounds and waits for their answers. Raises PeerError when an engine is gone."""
        playing = dict(self._playing)
        await asyncio.gather(*(link.pause() for link in playing))
        await asyncio.gather(*playing.values())

    def forget_features(self) -> None:
        """Does nothing: an asynchronous run is not reproducible bit by bit, and its engines may be in a round."""

    def _update(self, version: int, check: Check) -> dict[str, float]:
        self.world.enter_thread()
        return self.weights_changed(version) | check(version)

    def _place(self) -> None:
        waiting = {asked[0].session: asked for asked in self._arrived if not asked[1].done()}
        self._arrived = []
        shares = cast(dict[Link, list[Request]], self._share([request for request, _ in waiting.values()]))
        for link, requests in shares.items():
            self._queues[link] += [waiting[request.session] for request in requests]
            self._start(link)

    def _start(self, link: Link) -> None:
        if self._queues[link] and link not in self._playing and not self._held:
            self._playing[link] = asyncio.get_running_loop().create_task(self._play_at(link))

    async def _play_at(self, link: Link) -> None:
        """Samples rounds until no request is queued for this engine."""
        while not self._held:
            asked = [one for one in self._queues.pop(link, []) if not one[1].done()]  # without those of ended episodes
            if not asked:
                break
            outcomes: list[Outcome]
            try:
                outcomes = await link.ask([request for request, _ in asked])
            except Exception as error:
                outcomes = [error] * len(asked)
            self._count()
            settle([answer for _, answer in asked], outcomes)
        del self._playing[link]
