"""What travels between learner and engine processes arrives as it was, and pixels travel once."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.engines.base import EngineCounts, EngineError, Outcome, Request
from npu_vlrl.engines.messages import RequestReader, RequestWriter, pack_outcomes, unpack_outcomes
from npu_vlrl.types import Generation, Image, ImageInput, SamplingParams, StopReason

M = TypeVar("M")


def sent(message: M) -> M:
    """As a channel would deliver it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def an_image(seed: int, side: int = 4) -> ImageInput:
    rgb = np.random.default_rng(seed).integers(0, 256, (side, side + 2, 3), dtype=np.uint8)
    return ImageInput(Image(rgb), (1, 2, 2 + seed), 1 + seed)


def request(session: int, images: Sequence[ImageInput] = (), tokens: Sequence[int] = (5, 6)) -> Request:
    return Request(session, tuple(tokens), tuple(images), SamplingParams(4, seed=session))


# --- requests --------------------------------------------------------------------------------------------------------

params = st.builds(
    SamplingParams,
    st.integers(1, 10**6),
    st.floats(0, 3),
    st.floats(0.01, 1),
    st.integers(0, 1000),
    st.integers(0, 2**56),
)
requests = st.builds(
    Request,
    st.integers(0, 10**9),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple),
    st.lists(st.integers(0, 3).map(an_image), max_size=3).map(tuple),
    params,
)


@settings(max_examples=50)
@given(st.lists(st.lists(requests, min_size=1, max_size=4), min_size=1, max_size=3), st.sampled_from([0, 100, 10**6]))
def test_rounds_arrive_as_they_were_sent(rounds: list[list[Request]], cache_bytes: int) -> None:
    writer, reader = RequestWriter(cache_bytes), RequestReader()
    for one in rounds:
        arrived = reader.unpack(sent(writer.pack(one)))
        assert arrived == one
        for there, here in zip(arrived, one, strict=True):
            assert there.prompt() == here.prompt()
            for a, b in zip(there.images, here.images, strict=True):
                assert np.array_equal(a.image.rgb, b.image.rgb)


def test_pixels_travel_once() -> None:
    writer = RequestWriter()
    first = writer.pack([request(0, [an_image(0), an_image(1)]), request(1, [an_image(0)])])
    assert len(first.token_ids) == 4 * 8 and [len(pixels) for pixels in first.images.pixels] == [4 * 6 * 3, 4 * 6 * 3]
    second = writer.pack([request(0, [an_image(0), an_image(2)]), request(2, [an_image(1)])])
    assert second.images.pixels == [an_image(2).image.rgb.tobytes()]
    assert [entry.size for entry in second.images.entries] == [None, (4, 6), None]


def test_old_images_are_dropped_by_both_and_sent_again() -> None:
    one = an_image(0).image.rgb.nbytes
    writer, reader = RequestWriter(cache_bytes=2 * one), RequestReader()

    def play(*seeds: int) -> tuple[list[str], int]:
        """Which images are dropped, and how many travel."""
        asked = [request(0, [an_image(seed) for seed in seeds])]
        packed = writer.pack(asked)
        assert reader.unpack(sent(packed)) == asked
        return packed.images.dropped, len(packed.images.pixels)

    names = [an_image(seed).image.hash for seed in range(5)]
    assert play(0) == ([], 1)
    assert play(1) == ([], 1)
    assert play(0) == ([], 0)
    assert play(2) == ([names[1]], 1)  # 1 was used longest ago
    assert play(1) == ([names[0]], 1)
    assert play(0, 1, 2) == ([], 1)  # too much, but all of it is needed
    assert play(3, 4) == ([names[0], names[1], names[2]], 2)


def test_other_pixels_than_announced_are_refused() -> None:
    packed = RequestWriter().pack([request(0, [an_image(0)])])
    flipped = bytearray(packed.images.pixels[0])
    flipped[7] ^= 1
    damaged = msgspec.structs.replace(packed.images, pixels=[bytes(flipped)])
    with pytest.raises(ValueError, match=f"image {an_image(0).image.hash[:12]} came with the pixels of"):
        RequestReader().unpack(sent(msgspec.structs.replace(packed, images=damaged)))
    RequestReader().unpack(sent(packed))


# --- outcomes --------------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False) | st.just(-0.0) | st.just(5e-324)
tokens = st.lists(st.tuples(st.integers(0, 2**31), finite, st.integers(0, 2**40)), max_size=5)
routes = st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 3)).map(
    lambda shape: np.random.default_rng(sum(shape)).integers(-1, 2**15, shape, np.int16)
)
generations = st.builds(
    lambda rows, stop, routes: Generation(*(tuple(row[i] for row in rows) for i in range(3)), stop, routes),
    tokens,
    st.sampled_from(StopReason),
    st.none() | routes,
)


def bits(outcome: Outcome) -> object:
    if isinstance(outcome, Generation):
        routes = outcome.routes if outcome.routes is None else (outcome.routes.shape, outcome.routes.tobytes())
        return outcome.token_ids, struct.pack(f"{len(outcome.logprobs)}d", *outcome.logprobs), outcome, routes
    return type(outcome), str(outcome)


@settings(max_examples=50)
@given(st.lists(generations | st.text(max_size=5).map(ValueError), max_size=5))
def test_outcomes_arrive_bit_for_bit(outcomes: list[Outcome]) -> None:
    answers = sent(pack_outcomes(outcomes, EngineCounts(1, 2, 3)))
    assert answers.counts == EngineCounts(1, 2, 3)
    arrived = unpack_outcomes(answers, "engine 1")
    assert [bits(outcome) for outcome in arrived] == [bits(outcome) for outcome in outcomes]
    for outcome in arrived:
        if isinstance(outcome, Generation):
            assert all(type(token) is int for token in (*outcome.token_ids, *outcome.weight_versions))
            assert all(type(value) is float and math.isfinite(value) for value in outcome.logprobs)


def test_what_is_no_fault_of_the_request_names_the_engine() -> None:
    message = sent(pack_outcomes([ValueError("too long"), MemoryError("out of memory")], EngineCounts()))
    refused, failed = unpack_outcomes(message, "engine 2 (rank 2)")
    assert type(refused) is ValueError and str(refused) == "too long"
    assert isinstance(failed, EngineError) and str(failed) == "engine 2 (rank 2): MemoryError: out of memory"
