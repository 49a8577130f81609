"""Messages between the learner and an engine process: rounds, their outcomes, and commands between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np

from npu_vlrl.engines.base import EngineCounts, EngineError, Outcome, Request
from npu_vlrl.network.images import CACHE_BYTES, FLOATS, INTEGERS, ROUTES, ImageReader, Images, ImageWriter, as_bytes
from npu_vlrl.network.messages import Message
from npu_vlrl.types import Generation, ImageInput, SamplingParams, StopReason


class RequestEntry(msgspec.Struct, frozen=True):
    """One turn of a round."""

    session: int
    n_tokens: int
    images: list[int]
    """Indices into the images of the round."""
    sampling: SamplingParams


class Requests(msgspec.Struct, frozen=True):
    """The turns of a round."""

    entries: list[RequestEntry]
    token_ids: bytes
    """int64: the context of each turn, one after the other."""
    images: Images


class Round(Message):
    """Requests the turns of a round; answered by `Answers`. Any message that arrives meanwhile interrupts it."""

    requests: Requests
    closed: list[int]
    """Sessions that have ended since the last round."""


class Probe(Message):
    """Requests turns that do not count as work; answered by `Answers`."""

    requests: Requests


class Pause(Message):
    """Interrupts the running round, and requests nothing."""


class Sleep(Message):
    """See `RoundEngine.sleep`."""


class ForgetFeatures(Message):
    """See `RoundEngine.forget_features`."""


class WeightsChanged(Message):
    """The engine's own learner has stepped its weights to this version."""

    version: int


class Generated(msgspec.Struct, frozen=True, tag=True):
    """A turn was sampled."""

    n_tokens: int
    stop_reason: StopReason
    routes_shape: tuple[int, int, int] | None
    """Shape of `Generation.routes`; None without routes."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request was invalid."""

    reason: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The engine failed."""

    reason: str


class Answers(Message):
    """The outcomes of a round, one for each request, in order."""

    entries: list[Generated | Refused | Broken]
    token_ids: bytes
    """int64: tokens of each generated turn, one after the other."""
    logprobs: bytes
    """float64: log-probabilities of these tokens."""
    weight_versions: bytes
    """int64: weight versions of these tokens."""
    routes: list[bytes]
    """int16: routes of each turn that has any. One value for all would exceed what a message may hold."""
    counts: EngineCounts
    """Counts of the engine so far."""


class RequestWriter:
    """Packs requests for one engine; the learner's side."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._images = ImageWriter(cache_bytes)

    def pack(self, requests: Sequence[Request]) -> Requests:
        numbers: dict[ImageInput, int] = {}
        entries = []
        for request in requests:
            shown = [numbers.setdefault(image, len(numbers)) for image in request.images]
            entries.append(RequestEntry(request.session, len(request.token_ids), shown, request.sampling))
        ids = as_bytes([token for request in requests for token in request.token_ids], INTEGERS)
        return Requests(entries, ids, self._images.pack(numbers))


class RequestReader:
    """Unpacks requests; the engine's side."""

    def __init__(self) -> None:
        self._images = ImageReader()

    def unpack(self, requests: Requests) -> list[Request]:
        """Reads the requests back. Raises ValueError when an image does not have its hash."""
        ids = np.frombuffer(requests.token_ids, INTEGERS)
        images = self._images.unpack(requests.images)
        ends = accumulate(entry.n_tokens for entry in requests.entries)
        return [
            Request(
                entry.session,
                tuple(ids[end - entry.n_tokens : end].tolist()),
                tuple(images[number] for number in entry.images),
                entry.sampling,
            )
            for end, entry in zip(ends, requests.entries, strict=True)
        ]


def pack_outcomes(outcomes: Sequence[Outcome], counts: EngineCounts) -> Answers:
    """The answer that `unpack_outcomes` reads back."""
    done = [outcome for outcome in outcomes if isinstance(outcome, Generation)]
    return Answers(
        list(map(_entry, outcomes)),
        as_bytes([token for one in done for token in one.token_ids], INTEGERS),
        as_bytes([logprob for one in done for logprob in one.logprobs], FLOATS),
        as_bytes([version for one in done for version in one.weight_versions], INTEGERS),
        [as_bytes(one.routes, ROUTES) for one in done if one.routes is not None],
        counts,
    )


def _entry(outcome: Outcome) -> Generated | Refused | Broken:
    if isinstance(outcome, Generation):
        shape = None if outcome.routes is None else outcome.routes.shape
        return Generated(len(outcome.token_ids), outcome.stop_reason, shape)
    if isinstance(outcome, ValueError):
        return Refused(str(outcome))
    return Broken(f"{type(outcome).__name__}: {outcome}")


def unpack_outcomes(answers: Answers, engine: object) -> list[Outcome]:
    """Reads the outcomes of a round back. An error of the engine becomes an EngineError that names `engine`."""
    ids, versions = (np.frombuffer(part, INTEGERS).tolist() for part in (answers.token_ids, answers.weight_versions))
    logprobs = np.frombuffer(answers.logprobs, FLOATS).tolist()
    all_routes = iter(answers.routes)
    outcomes: list[Outcome] = []
    start = 0
    for entry in answers.entries:
        match entry:
            case Generated(n_tokens, stop_reason, shape):
                own = slice(start, start + n_tokens)
                start = own.stop
                routes = None if shape is None else np.frombuffer(next(all_routes), ROUTES).reshape(shape)
                outcomes.append(
                    Generation(tuple(ids[own]), tuple(logprobs[own]), tuple(versions[own]), stop_reason, routes)
                )
            case Refused(reason):
                outcomes.append(ValueError(reason))
            case Broken(reason):
                outcomes.append(EngineError(f"{engine}: {reason}"))
    return outcomes
