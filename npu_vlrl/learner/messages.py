"""Messages between learners: work, and samples bit by bit. A segment that several samples share is sent once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import msgspec
import numpy as np

from npu_vlrl.network.images import FLOATS, INTEGERS, ROUTES, ImageReader, Images, ImageWriter, as_bytes
from npu_vlrl.network.messages import Message
from npu_vlrl.types import Credit, ImageInput, Sample, Scores, Segment, SegmentKind, SpecialTokens, StopReason

SCORES = ("proximal_N", "reference_N", "values_N")
CREDIT = ("advantages_N", "returns_N", "critic_N")


class SegmentEntry(msgspec.Struct, frozen=True):
    """A segment without its numbers."""

    kind: SegmentKind
    n_tokens: int
    images: list[int]
    """Indices into the images of the message."""
    stop_reason: StopReason | None
    routes_shape: tuple[int, int, int] | None


class ArrayEntry(msgspec.Struct, frozen=True):
    """An array of the blob of arrays."""

    dtype: str
    length: int


class SampleEntry(msgspec.Struct, frozen=True):
    """A sample without its numbers."""

    id: str
    group: str
    episode: str
    segments: list[int]
    """Indices into the segments of the message."""
    trained: list[int]
    first_turn: int
    states: list[str | None]
    with_observations: bool
    scores: list[ArrayEntry | None]
    """Arrays in the order of `SCORES`."""
    credit: list[ArrayEntry] | None
    """Arrays in the order of `CREDIT`."""


class Samples(msgspec.Struct, frozen=True):
    """Samples of one model."""

    segments: list[SegmentEntry]
    samples: list[SampleEntry]
    images: Images
    token_ids: bytes
    """int64: token ids of all segments."""
    logprobs: bytes
    """float64: log-probabilities of all actions."""
    weight_versions: bytes
    """int64: weight versions of all actions."""
    routes: list[bytes]
    """int16: routes of each action that has them. One value for all would exceed what a message may hold."""
    rewards: bytes
    """float64: reward of each segment, then reward and outcome of each sample."""
    arrays: bytes
    """Scores and credit of each sample, one after the other."""


class BeginLearning(msgspec.Struct, frozen=True, tag=True):
    """Command to make the learner."""


class Score(msgspec.Struct, frozen=True, tag=True):
    """See `Learner.score`."""


class Logprobs(msgspec.Struct, frozen=True, tag=True):
    """See `Learner.logprobs`."""

    temperature: float


class Step(msgspec.Struct, frozen=True, tag=True):
    """See `Learner.step`."""

    version: int | None
    note: bool


class Supervise(msgspec.Struct, frozen=True, tag=True):
    """See `Learner.supervise`."""

    lr: float


class Forget(msgspec.Struct, frozen=True, tag=True):
    """See `Learner.forget_features`."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """See `save_learner`."""

    folder: str
    step: int
    keep: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """See `load_learner`."""

    path: str


Work = BeginLearning | Score | Logprobs | Step | Supervise | Forget | Save | Load
"""A request to a learner: a method of `Learner`, and its arguments."""


class Learn(Message):
    """Command to another rank to do the same work as rank 0; answered by `Done`."""

    work: Work
    samples: Samples


class Done(Message):
    """Answer after the work is done."""

    sums: list[int]
    """Checksums of the weights, see `sums_of_bits`."""
    tokens_referenced: float
    tokens_computed: float


class SampleWriter:
    """Packs samples, in the rank that has them; all readers get the same messages."""

    def __init__(self) -> None:
        self._images = ImageWriter()

    def pack(self, samples: Sequence[Sample]) -> Samples:
        """Packs samples so that `SampleReader.unpack` reads them back bit by bit."""
        segments = list({id(segment): segment for sample in samples for segment in sample.segments}.values())
        numbers = {id(segment): number for number, segment in enumerate(segments)}
        images: dict[ImageInput, int] = {}
        arrays: list[bytes] = []
        rewards = [segment.reward for segment in segments]
        rewards += chain.from_iterable((sample.reward, sample.outcome) for sample in samples)
        return Samples(
            [
                SegmentEntry(
                    segment.kind,
                    len(segment),
                    [images.setdefault(image, len(images)) for image in segment.images],
                    segment.stop_reason,
                    None if segment.routes is None else segment.routes.shape,
                )
                for segment in segments
            ],
            [_entry(sample, numbers, arrays) for sample in samples],
            self._images.pack(images),
            as_bytes([token for segment in segments for token in segment.token_ids], INTEGERS),
            as_bytes([logprob for segment in segments for logprob in segment.logprobs], FLOATS),
            as_bytes([version for segment in segments for version in segment.weight_versions], INTEGERS),
            [as_bytes(segment.routes, ROUTES) for segment in segments if segment.routes is not None],
            as_bytes(rewards, FLOATS),
            b"".join(arrays),
        )


def _entry(sample: Sample, numbers: dict[int, int], arrays: list[bytes]) -> SampleEntry:
    """Makes the entry of a sample, and appends the bytes of its arrays to `arrays`."""

    def entry(array: np.ndarray) -> ArrayEntry:
        arrays.append(array.tobytes())
        return ArrayEntry(array.dtype.str, len(array))

    scores = [getattr(sample.scores, name) for name in SCORES]
    return SampleEntry(
        sample.id,
        sample.group,
        sample.episode,
        [numbers[id(segment)] for segment in sample.segments],
        list(sample.trained),
        sample.first_turn,
        list(sample.states),
        sample.with_observations,
        [None if array is None else entry(array) for array in scores],
        None if sample.credit is None else [entry(getattr(sample.credit, name)) for name in CREDIT],
    )


class SampleReader:
    """Unpacks samples, in the other ranks."""

    def __init__(self, special: SpecialTokens) -> None:
        """`special` are the special tokens of the model."""
        self._special = special
        self._images = ImageReader()

    def unpack(self, message: Samples) -> list[Sample]:
        """Reads the samples back. Raises ValueError when a segment is invalid, or an image does not have its hash."""
        images = self._images.unpack(message.images)
        rewards = iter(np.frombuffer(message.rewards, FLOATS).tolist())
        segments = self._segments(message, images, rewards)
        read = _Arrays(message.arrays).read
        return [
            Sample(
                entry.id,
                entry.group,
                tuple(segments[number] for number in entry.segments),
                tuple(entry.trained),
                next(rewards),
                next(rewards),
                entry.episode,
                entry.first_turn,
                tuple(entry.states),
                entry.with_observations,
                Scores(*(None if array is None else read(array) for array in entry.scores)),
                None if entry.credit is None else Credit(*map(read, entry.credit)),
            )
            for entry in message.samples
        ]

    def _segments(self, message: Samples, images: Sequence[ImageInput], rewards: Iterator[float]) -> list[Segment]:
        tokens = iter(np.frombuffer(message.token_ids, INTEGERS).tolist())
        logprobs = iter(np.frombuffer(message.logprobs, FLOATS).tolist())
        versions = iter(np.frombuffer(message.weight_versions, INTEGERS).tolist())
        routes = iter(message.routes)
        segments = []
        for entry in message.segments:
            sampled = entry.n_tokens if entry.kind is SegmentKind.ACTION else 0
            segments.append(
                Segment(
                    entry.kind,
                    tuple(islice(tokens, entry.n_tokens)),
                    self._special,
                    tuple(images[number] for number in entry.images),
                    tuple(islice(logprobs, sampled)),
                    tuple(islice(versions, sampled)),
                    entry.stop_reason,
                    next(rewards),
                    np.frombuffer(next(routes), ROUTES).reshape(entry.routes_shape) if entry.routes_shape else None,
                )
            )
        return segments


class _Arrays:
    """Reader of consecutive arrays in a blob."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._offset = 0

    def read(self, entry: ArrayEntry) -> np.ndarray:
        """Reads the next array."""
        array = np.frombuffer(self._blob, entry.dtype, entry.length, self._offset).copy()
        self._offset += array.nbytes
        return array
