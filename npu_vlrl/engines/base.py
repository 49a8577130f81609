"""Base of all engines: sessions, and the rounds in which their turns are sampled.

A round starts when every open session has requested its turn, and has the requests in the order in which the sessions
were opened. The content of a round depends on the requests alone, never on timing, so a run is reproducible.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from npu_vlrl.types import Generation, ImageInput, SamplingParams, Segment, StopReason


class EngineError(RuntimeError):
    """An engine could not answer a request; the message names its process, or vLLM."""


class EngineEnded(EngineError):
    """The process of an engine failed, and answers no more requests."""


@dataclass
class EngineCounts:
    """Work done so far; `tokens_requested - tokens_prefilled` were saved by sharing and caching."""

    tokens_requested: int = 0
    """Context tokens of all requests."""
    tokens_prefilled: int = 0
    """Context tokens that were computed."""
    tokens_decoded: int = 0
    turns: int = 0
    images_referenced: int = 0
    """Images that were requested, by engines with vision features of their own; the others share the learner's."""
    images_encoded: int = 0
    """Referenced images that went through the tower."""


@dataclass(frozen=True)
class Request:
    """One turn to sample."""

    session: int
    token_ids: tuple[int, ...]
    images: tuple[ImageInput, ...]
    sampling: SamplingParams

    def prompt(self) -> tuple[object, ...]:
        """Key that is equal for requests with the same tokens and images, such as the first turns of a group."""
        return self.token_ids, tuple(image.image.hash for image in self.images)

    def after(self, part: Generation) -> Request:
        """Request for the rest of a turn, after `part`.

        The rest is drawn with a seed of its own, since an engine draws from the beginning of a seed's random stream.
        """
        if not part.token_ids:
            return self
        left = self.sampling.max_new_tokens - len(part.token_ids)
        digest = hashlib.sha256(f"{self.sampling.seed}/{len(part.token_ids)}".encode()).digest()
        sampling = replace(self.sampling, max_new_tokens=left, seed=int.from_bytes(digest[:7]))
        return replace(self, token_ids=self.token_ids + part.token_ids, sampling=sampling)


Outcome = Generation | Exception
"""Result of a request: a turn or an error. A ValueError is the fault of the request alone."""

Check = Callable[[int], dict[str, float]]
"""Function of the version of new weights, called before a round begins with them; returns metrics, or raises to end
the run."""


def no_check(version: int) -> dict[str, float]:
    """Default check of an update, which checks nothing."""
    return {}


class Session:
    """See `types.EngineSession`. Sessions are numbered in the order in which they are opened."""

    def __init__(self, engine: RoundEngine, number: int) -> None:
        self.engine = engine
        self.number = number

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        """Samples a full turn, also over interruptions; each token keeps the version of its weights."""
        token_ids = tuple(token for segment in context for token in segment.token_ids)
        images = tuple(image for segment in context for image in segment.images)
        if not token_ids or sampling.max_new_tokens < 1:
            raise ValueError("a generation needs a context and at least one new token")
        request = Request(self.number, token_ids, images, sampling)
        turn = await self.engine.ask(request)
        while turn.stop_reason is StopReason.INTERRUPTED:
            turn = _joined(turn, await self.engine.ask(request.after(turn)))
        return turn

    def close(self) -> None:
        self.engine.close_session(self.number)


def _joined(part: Generation, rest: Generation) -> Generation:
    return Generation(
        part.token_ids + rest.token_ids,
        part.logprobs + rest.logprobs,
        part.weight_versions + rest.weight_versions,
        rest.stop_reason,
        _joined_routes(part, rest),
    )


def _joined_routes(part: Generation, rest: Generation) -> np.ndarray | None:
    """Routes of both parts. Tokens that `rest` computed again keep those of `part` unless the weights have changed; see
    `Sample.routes`.
    """
    if part.routes is None or rest.routes is None:
        return part.routes if rest.routes is None else rest.routes
    again = len(rest.routes) - len(rest.token_ids)
    if part.weight_versions[-1:] == rest.weight_versions[:1]:
        return np.concatenate([part.routes, rest.routes[again:]])
    return np.concatenate([part.routes[: max(0, len(part.routes) - again)], rest.routes])


class RoundEngine(ABC):
    """See `types.Engine`. One event loop at a time may use it."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.counts = EngineCounts()
        self.interrupted: Callable[[], bool] = lambda: False
        """Called repeatedly during a round: True ends it, and unfinished turns are answered with the tokens so far."""
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._waiting: dict[int, tuple[Request, asyncio.Future[Generation]]] = {}
        self._rounds: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        """Samples the turns of a round, all at once; returns the outcome of each request, in order."""

    @abstractmethod
    def weights_changed(self, version: int) -> dict[str, float]:
        """Brings the engine to the learner's weights, which are now those of `version`; call it between rounds.

        Returns bytes and seconds of the transfer, as metrics; none where the weights are shared.
        """

    def probe(self, requests: Sequence[Request]) -> dict[str, list[Outcome]]:
        """Samples the same turns in every engine; returns their outcomes by the engine's name. Call it between rounds.
        It does not count as work, and ends the sessions of the requests.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be probed")

    def sleep(self) -> None:  # noqa: B027  # most have none to release
        """Releases memory until `weights_changed`, where the engine can; call it between rounds."""

    async def update(self, version: int, check: Check = no_check) -> dict[str, float]:
        """Brings the engine to new weights, see `weights_changed`; an engine whose rounds are running interrupts them.

        `check` is called with the version before the next round begins; its metrics are added.
        """
        return self.weights_changed(version) | check(version)

    async def rest(self) -> None:
        """Returns when no round is running. Call it after the episodes were cancelled."""
        await asyncio.gather(*self._rounds)

    @abstractmethod
    def forget_features(self) -> None:
        """Empties the cache of vision features, so that its state equals that of a resumed run."""

    @abstractmethod
    def forget_session(self, number: int) -> None:
        """Drops the cached state of a session."""

    def session(self) -> Session:
        session = Session(self, next(self._numbers))
        self._open.add(session.number)
        return session

    async def ask(self, request: Request) -> Generation:
        assert request.session in self._open, "the session is closed"
        assert request.session not in self._waiting, "the session waits for its turn already"
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.session] = request, answer
        self._start_when_full()
        return await answer

    def close_session(self, number: int) -> None:
        if number in self._open:
            self._open.discard(number)
            self._waiting.pop(number, None)
            self.forget_session(number)
            self._start_when_full()

    def _is_full(self) -> bool:
        return bool(self._waiting) and len(self._waiting) == len(self._open)

    def _start_when_full(self) -> None:
        if self._is_full():
            # a task begins later, not now: sessions opened in the same iteration of the loop still join the round
            task = asyncio.get_running_loop().create_task(self._round())
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)

    async def _round(self) -> None:
        if not self._is_full():
            return
        asked = [self._waiting[number] for number in sorted(self._waiting)]
        self._waiting.clear()
        try:
            outcomes = await self.play([request for request, _ in asked])
        except Exception as error:
            outcomes = [error] * len(asked)
        settle([answer for _, answer in asked], outcomes)


def settle(answers: Sequence[asyncio.Future[Generation]], outcomes: Sequence[Outcome]) -> None:
    """Sets the outcomes of a round in the futures that await them."""
    for answer, outcome in zip(answers, outcomes, strict=True):
        if answer.done():  # it was cancelled
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
