"""Samples as messages: JSON for what is small, raw bytes for ids and floats, so that nothing is rounded.

A message holds each segment once, however many samples have it, and the pixels of a picture once for all messages:

    {"segments": [[kind, tokens, [picture, …], stop reason], …],
     "samples": [[id, group, episode, [segment, …], [trained, …], first turn, [state, …], observations, arrays], …],
     "pictures": …, "dropped": …}

`arrays` are [dtype, length] of a sample's scores and credit, null for one that is not there. The blobs are ids,
logprobs, versions, rewards (of all segments, then reward and outcome of each sample), all arrays, and pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from npu_vlrl.rollout.wire import FLOATS, INTEGERS, PictureReader, PictureWriter, as_bytes
from npu_vlrl.sync.channel import Message
from npu_vlrl.types import Credit, ImageInput, Sample, Scores, Segment, SegmentKind, SpecialTokens, StopReason

SCORES = ("proximal_N", "reference_N", "values_N")
CREDIT = ("advantages_N", "returns_N", "critic_N")


class SampleWriter:
    """The side of the rank that has the samples; all readers get the same messages."""

    def __init__(self) -> None:
        self._pictures = PictureWriter()

    def pack(self, samples: Sequence[Sample]) -> tuple[dict[str, Any], list[bytes]]:
        """Content and blobs of a message that `SampleReader.unpack` reads back, bit by bit."""
        segments = list({id(segment): segment for sample in samples for segment in sample.segments}.values())
        numbers = {id(segment): number for number, segment in enumerate(segments)}
        images: dict[ImageInput, int] = {}
        described = [
            [
                segment.kind,
                len(segment),
                [images.setdefault(i, len(images)) for i in segment.images],
                segment.stop_reason,
            ]
            for segment in segments
        ]
        arrays: list[bytes] = []
        listed = [
            [
                *(sample.id, sample.group, sample.episode, [numbers[id(segment)] for segment in sample.segments]),
                *(sample.trained, sample.first_turn, sample.states, sample.with_observations),
                _describe(sample, arrays),
            ]
            for sample in samples
        ]
        pictures, pixels = self._pictures.pack(images)
        rewards = [segment.reward for segment in segments]
        rewards += chain.from_iterable((sample.reward, sample.outcome) for sample in samples)
        return {"segments": described, "samples": listed, **pictures}, [
            as_bytes([token for segment in segments for token in segment.token_ids], INTEGERS),
            as_bytes([logprob for segment in segments for logprob in segment.logprobs], FLOATS),
            as_bytes([version for segment in segments for version in segment.weight_versions], INTEGERS),
            as_bytes(rewards, FLOATS),
            b"".join(arrays),
            *pixels,
        ]


class SampleReader:
    """The other side."""

    def __init__(self, special: SpecialTokens) -> None:
        """`special` are those of the model that the samples are for."""
        self._special = special
        self._pictures = PictureReader()

    def unpack(self, message: Message) -> list[Sample]:
        """Raises ValueError when a segment is not a valid one, or a picture not the one that its hash names."""
        content, (ids, logprobs, versions, rewards, arrays, *pixels) = message.content, message.blobs
        images = self._pictures.unpack(content, pixels)
        tokens, numbers = (iter(np.frombuffer(blob, INTEGERS).tolist()) for blob in (ids, versions))
        chances, earned = (iter(np.frombuffer(blob, FLOATS).tolist()) for blob in (logprobs, rewards))
        segments = []
        for kind, size, shown, stop_reason in content["segments"]:
            sampled = size if kind == SegmentKind.ACTION else 0
            segments.append(
                Segment(
                    SegmentKind(kind),
                    tuple(islice(tokens, size)),
                    self._special,
                    tuple(images[number] for number in shown),
                    tuple(islice(chances, sampled)),
                    tuple(islice(numbers, sampled)),
                    None if stop_reason is None else StopReason(stop_reason),
                    next(earned),
                )
            )
        read = _Arrays(arrays).read
        return [
            Sample(
                name,
                group,
                tuple(segments[number] for number in held),
                tuple(trained),
                next(earned),
                next(earned),
                episode,
                first_turn,
                tuple(states),
                observations,
                Scores(*map(read, described[:3])),
                None if described[3] is None else Credit(*map(read, described[3:])),  # type: ignore[arg-type]
            )
            for name, group, episode, held, trained, first_turn, states, observations, described in content["samples"]
        ]


class _Arrays:
    """Arrays that stand one behind the other in a blob."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._offset = 0

    def read(self, described: tuple[str, int] | None) -> np.ndarray | None:
        """The next one, by type and length."""
        if described is None:
            return None
        dtype, length = described
        array = np.frombuffer(self._blob, dtype, length, self._offset).copy()
        self._offset += array.nbytes
        return array


def _describe(sample: Sample, arrays: list[bytes]) -> list[tuple[str, int] | None]:
    """Type and length of each array; the bytes are added to `arrays`."""
    found = [getattr(sample.scores, name) for name in SCORES]
    found += [getattr(sample.credit, name, None) for name in CREDIT]
    arrays += [array.tobytes() for array in found if array is not None]
    return [None if array is None else (array.dtype.str, len(array)) for array in found]
