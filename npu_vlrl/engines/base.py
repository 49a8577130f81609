"""What every engine has in common: sessions, and the rounds that their turns are sampled in.

A round starts when every open session has asked for its turn, and holds their requests in the order in which the
sessions were opened. What is in a round depends on the requests alone, never on timing, so a run repeats exactly.
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
    """An engine could not do what it was asked; the message names its process, or vLLM."""


class EngineEnded(EngineError):
    """The process of an engine failed, and nothing can be asked of it any more."""


@dataclass
class EngineCounts:
    """Work done so far; what sharing saved is `requested - prefilled`."""

    tokens_requested: int = 0
    """Context tokens of all requests."""
    tokens_prefilled: int = 0
    """Context tokens that were really computed."""
    tokens_decoded: int = 0
    turns: int = 0
    images_referenced: int = 0
    """Pictures that were asked for, by engines with vision features of their own; the others share the learner's."""
    images_encoded: int = 0
    """Those of them that went through the tower."""


@dataclass(frozen=True)
class Request:
    """One turn to sample."""

    session: int
    token_ids: tuple[int, ...]
    images: tuple[ImageInput, ...]
    sampling: SamplingParams

    def prompt(self) -> tuple[object, ...]:
        """Equal for requests with the same tokens and pictures, such as the first turns of a group."""
        return self.token_ids, tuple(image.image.hash for image in self.images)

    def after(self, part: Generation) -> Request:
        """What asks for the rest of a turn of which `part` is there.

        The rest is drawn with a seed of its own: an engine draws from the beginning of what a seed gives.
        """
        if not part.token_ids:
            return self
        left = self.sampling.max_new_tokens - len(part.token_ids)
        digest = hashlib.sha256(f"{self.sampling.seed}/{len(part.token_ids)}".encode()).digest()
        sampling = replace(self.sampling, max_new_tokens=left, seed=int.from_bytes(digest[:7]))
        return replace(self, token_ids=self.token_ids + part.token_ids, sampling=sampling)


Outcome = Generation | Exception
"""What became of a request; a ValueError is the fault of the request alone."""

Check = Callable[[int], dict[str, float]]
"""Called with the version of new weights before a round begins with them; returns metrics, or raises to end a run."""


def no_check(version: int) -> dict[str, float]:
    """Stands for a check of an update where there is none."""
    return {}


class Session:
    """See `types.EngineSession`. Sessions are numbered in the order in which they are opened."""

    def __init__(self, engine: RoundEngine, number: int) -> None:
        self.engine = engine
        self.number = number

    async def generate(self, context: Sequence[Segment], sampling: SamplingParams) -> Generation:
        """A whole turn, in as many parts as it is interrupted; each token keeps the version that made it."""
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
    """Routes of `rest`, and of the tokens of `part` that it did not compute again."""
    if part.routes is None or rest.routes is None:
        return part.routes if rest.routes is None else rest.routes
    again = len(rest.routes) - len(rest.token_ids)
    return np.concatenate([part.routes[: max(0, len(part.routes) - again)], rest.routes])


class RoundEngine(ABC):
    """See `types.Engine`. One event loop at a time may use it."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.counts = EngineCounts()
        self.interrupted: Callable[[], bool] = lambda: False
        """Asked again and again during a round: True ends it, and unfinished turns are answered with what they have."""
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._waiting: dict[int, tuple[Request, asyncio.Future[Generation]]] = {}
        self._rounds: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        """Samples the turns of a round, all at once; returns what became of each request, in order."""

    @abstractmethod
    def weights_changed(self, version: int) -> dict[str, float]:
        """Tells that the learner's weights are now those of `version`; call it between rounds.

        Returns what the transfer cost, as metrics; nothing where the weights are shared.
        """

    def probe(self, requests: Sequence[Request]) -> dict[str, list[Outcome]]:
        """Samples the same turns in every engine, by its name; call it between rounds. It counts as no work, and the
        sessions of the requests end with it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be probed")

    def sleep(self) -> None:  # noqa: B027  # most have none to give
        """Gives back what memory it can until `weights_changed`; call it between rounds."""

    async def update(self, version: int, check: Check = no_check) -> dict[str, float]:
        """See `weights_changed`; an engine whose rounds go on meanwhile interrupts them.

        `check` is called with the version before the next round begins; what it says is added to the metrics.
        """
        return self.weights_changed(version) | check(version)

    async def rest(self) -> None:
        """Returns when no round is being played; the episodes have been told to end."""
        await asyncio.gather(*self._rounds)

    @abstractmethod
    def forget_features(self) -> None:
        """Empties the cache of vision features, as it is when a run is resumed."""

    @abstractmethod
    def forget_session(self, number: int) -> None:
        """Drops what is kept of a session between its turns."""

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
            # a task begins later, not now: sessions opened in the same breath still join the round
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
    """Gives the outcomes of a round to those who await them."""
    for answer, outcome in zip(answers, outcomes, strict=True):
        if answer.done():  # nobody awaits it any more
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
