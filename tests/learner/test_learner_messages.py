"""Samples arrive at other ranks bit by bit; what several hold travels once."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.learner.messages import SampleReader, Samples, SampleWriter
from npu_vlrl.types import (
    Credit,
    Image,
    ImageInput,
    Sample,
    Scores,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
)

SPECIAL = SpecialTokens((2,), image=9)
PROMPT, ACTION, OBSERVATION = SegmentKind.PROMPT, SegmentKind.ACTION, SegmentKind.OBSERVATION


def sent(samples: Samples) -> Samples:
    """As a channel would deliver it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(samples), type=Samples)


def an_image(seed: int) -> ImageInput:
    rgb = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return ImageInput(Image(rgb), (1, 2, 2 + seed), 1 + seed)


def said(kind: SegmentKind, ids: Sequence[int], seeds: Sequence[int] = ()) -> Segment:
    images = tuple(an_image(seed) for seed in seeds)
    return Segment(kind, (*ids, *(9 for image in images for _ in range(image.n_tokens))), SPECIAL, images)


def action(
    rows: Sequence[tuple[int, float, int]], stop: StopReason, reward: float, before: int | None = None
) -> Segment:
    """With routes of itself and of that many tokens before it, if any."""
    ids, logprobs, versions = (tuple(row[i] for row in rows) for i in range(3))
    routes = None
    if before is not None:
        routes = np.random.default_rng(before).integers(0, 128, (len(ids) + before, 2, 3), np.int16)
    return Segment(ACTION, ids, SPECIAL, (), logprobs, versions, stop, reward, routes)


finite = st.floats(allow_nan=False, allow_infinity=False) | st.just(-0.0) | st.just(5e-324)
ids = st.integers(10, 2**31)
actions = st.builds(
    action,
    st.lists(st.tuples(ids, finite, st.integers(0, 2**40)), min_size=1, max_size=4),
    st.sampled_from(StopReason),
    finite,
    st.none() | st.integers(0, 3),
)
worlds = st.builds(
    said, st.sampled_from([PROMPT, OBSERVATION]), st.lists(ids, max_size=4), st.lists(st.integers(0, 2), max_size=2)
)


def floats(n: int, width: int) -> st.SearchStrategy[np.ndarray]:
    bits = st.binary(min_size=n * width // 8, max_size=n * width // 8)
    return bits.map(lambda data: np.frombuffer(data, f"<f{width // 8}"))  # any bits, NaN and infinity among them


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    turns = draw(st.lists(st.tuples(worlds, actions), min_size=1, max_size=3))
    trained = tuple(2 * turn + 1 for turn in range(len(turns)))
    text = st.text(max_size=5)
    made = Sample(
        *(draw(text), draw(text), tuple(segment for turn in turns for segment in turn), trained),
        *(draw(finite), draw(finite), draw(text), draw(st.integers(0, 9))),
        tuple(draw(st.none() | text) for _ in turns),
        draw(st.booleans()),
    )
    scores = [draw(st.none() | floats(made.n_scored, 32)) for _ in range(3)]
    credit = None
    if draw(st.booleans()):
        marks = np.array([draw(st.booleans()) for _ in range(made.n_scored)], bool)
        credit = Credit(draw(floats(made.n_scored, 64)), draw(floats(made.n_scored, 64)), marks)
    return replace(made, scores=Scores(*scores), credit=credit)


def bits(value: Any) -> Any:
    """What must be the same of a sample, so that NaN is itself and -0.0 is not 0.0."""
    match value:
        case float():
            return struct.pack("d", value)
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case tuple():
            return tuple(map(bits, value))
        case Sample() | Segment() | Scores() | Credit():
            return type(value).__name__, {name: bits(field) for name, field in vars(value).items()}
        case _:
            return type(value), value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(samples(), max_size=3), min_size=1, max_size=3))
def test_samples_arrive_bit_by_bit(messages: list[list[Sample]]) -> None:
    writer, reader = SampleWriter(), SampleReader(SPECIAL)
    for given_samples in messages:
        arrived = reader.unpack(sent(writer.pack(given_samples)))
        assert [bits(sample) for sample in arrived] == [bits(sample) for sample in given_samples]
        for sample in arrived:
            assert all(type(token) is int for token in sample.token_ids)


def two_turns() -> list[Sample]:
    """Two samples of an episode, the first a beginning of the second."""
    opening, first = said(PROMPT, (11, 12), (0,)), action([(13, -0.5, 3)], StopReason.END_OF_TURN, 1.0)
    answer, second = said(OBSERVATION, (14,), (1,)), action([(15, -0.25, 3)], StopReason.TURN_BUDGET, 0.5)
    return [
        Sample("a/0", "a", (opening, first), (1,), 1.0, 1.5, "a"),
        Sample("a/1", "a", (opening, first, answer, second), (3,), 0.5, 1.5, "a", first_turn=1),
    ]


def test_what_samples_share_travels_once() -> None:
    writer, reader = SampleWriter(), SampleReader(SPECIAL)
    packed = writer.pack(two_turns())
    assert len(packed.segments) == 4
    assert np.frombuffer(packed.token_ids, "<i8").tolist() == [11, 12, 9, 13, 14, 9, 9, 15]
    assert np.frombuffer(packed.rewards, "<f8").tolist() == [0, 1, 0, 0.5, 1, 1.5, 0.5, 1.5]
    assert [len(pixels) for pixels in packed.images.pixels] == [4 * 6 * 3] * 2
    one, two = reader.unpack(sent(packed))
    assert one.segments[0] is two.segments[0]
    again = writer.pack(two_turns())  # scored, and sent again
    assert again.images.pixels == []
    assert [bits(sample) for sample in reader.unpack(sent(again))] == [bits(sample) for sample in two_turns()]


def test_a_damaged_message_is_refused() -> None:
    packed = SampleWriter().pack(two_turns())
    first, *others = packed.images.pixels
    flipped = msgspec.structs.replace(packed.images, pixels=[bytes([first[0] ^ 1]) + first[1:], *others])
    with pytest.raises(ValueError, match=f"image {an_image(0).image.hash[:12]} came with the pixels of"):
        SampleReader(SPECIAL).unpack(sent(msgspec.structs.replace(packed, images=flipped)))
    not_finite = msgspec.structs.replace(packed, logprobs=struct.pack("<2d", math.nan, -1.0))
    with pytest.raises(ValueError, match="logprob that is not finite"):
        SampleReader(SPECIAL).unpack(sent(not_finite))
