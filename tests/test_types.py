"""The vocabulary: what cannot be written down, and arrays that are derived."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.types import (
    EpisodeStatus,
    Image,
    ImageInput,
    Message,
    Sample,
    Segment,
    SegmentKind,
    SpecialTokens,
    StopReason,
    Task,
    Trajectory,
    Turn,
    Verdict,
)

SPECIAL = SpecialTokens(end_of_turn=(90, 91), image=80, video=81)
BLACK = Image(np.zeros((56, 56, 3), np.uint8))
FOUR = ImageInput(BLACK, (1, 4, 4), 4)
TASK = Task("t", (Message("user", (BLACK, "Which ", "way?")),), "up", "test")


def prompt(*ids: int, images: tuple[ImageInput, ...] = (), kind: SegmentKind = SegmentKind.PROMPT) -> Segment:
    return Segment(kind, ids, SPECIAL, images=images)


def observation(*ids: int, images: tuple[ImageInput, ...] = ()) -> Segment:
    return prompt(*ids, images=images, kind=SegmentKind.OBSERVATION)


def action(*ids: int, reward: float = 0.0, version: int = 0) -> Segment:
    values: dict[str, Any] = {"logprobs": tuple(-i / 10 for i in ids), "weight_versions": (version,) * len(ids)}
    return Segment(SegmentKind.ACTION, ids, SPECIAL, stop_reason=StopReason.END_OF_TURN, reward=reward, **values)


def change(segment: Segment, **values: Any) -> Segment:
    return dataclasses.replace(segment, special=SPECIAL, **values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"logprobs": (-0.1,)}, "2 ids, 1 logprobs and 2 weight versions"),
        ({"logprobs": ()}, "2 ids, 0 logprobs and 2 weight versions"),
        ({"weight_versions": (0,) * 3}, "2 ids, 2 logprobs and 3 weight versions"),
        ({"token_ids": (1, 2, 3)}, "3 ids, 2 logprobs"),
        ({"stop_reason": None}, "needs a stop reason"),
        ({"images": (FOUR,)}, "has no images"),
        ({"logprobs": (-0.1, math.nan)}, "logprob that is not finite"),
        ({"logprobs": (-math.inf, -0.1)}, "logprob that is not finite"),
        ({"reward": math.nan}, "reward nan, which is not finite"),
        ({"reward": math.inf}, "reward inf, which is not finite"),
        ({"token_ids": (1, 80)}, "contains an image or video placeholder"),
        ({"token_ids": (81, 1)}, "contains an image or video placeholder"),
    ],
)
def test_actions_that_cannot_be(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        change(action(1, 2), **values)


@pytest.mark.parametrize("kind", [SegmentKind.PROMPT, SegmentKind.OBSERVATION])
@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": (-0.1, -0.2)},
        {"weight_versions": (0, 0)},
        {"stop_reason": StopReason.END_OF_TURN},
        {"reward": 0.5},
    ],
)
def test_only_actions_carry_what_sampling_gives(kind: SegmentKind, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"a {kind} segment carries no"):
        change(prompt(1, 2, kind=kind), **values)


@pytest.mark.parametrize(
    ("ids", "images", "found", "expected"),
    [((1, 80, 80, 80), (FOUR,), 3, 4), ((80,) * 5, (FOUR,), 5, 4), ((80,) * 4, (), 4, 0), ((1,), (FOUR, FOUR), 0, 8)],
)
def test_placeholders_are_exactly_what_the_images_expand_to(
    ids: tuple[int, ...], images: tuple[ImageInput, ...], found: int, expected: int
) -> None:
    with pytest.raises(ValueError, match=rf"has {found} image placeholder tokens.* expand to {expected}"):
        prompt(*ids, images=images)
    with pytest.raises(ValueError, match=f"has {found} image placeholder"):
        observation(*ids, images=images)


def test_a_text_model_has_no_placeholders() -> None:
    assert SpecialTokens((90,)).placeholders == frozenset()
    assert SPECIAL.placeholders == {80, 81}
    assert len(Segment(SegmentKind.PROMPT, (80, 81), SpecialTokens((90,)))) == 2


@pytest.mark.parametrize(
    "rgb",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((3, 4, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.int64),
    ],
)
def test_images_are_rgb(rgb: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"Image needs uint8 \[height, width, 3\]"):
        Image(rgb)


def test_an_image_is_its_shape_and_pixels() -> None:
    rgb = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    image = Image(rgb)
    assert image.size == (4, 2)
    assert image.hash == hashlib.sha256(b"(2, 4, 3)" + bytes(range(24))).hexdigest()
    assert image == Image(rgb.copy()) and hash(image) == hash(Image(rgb.copy()))
    assert image != Image(rgb.reshape(4, 2, 3).copy())
    other = rgb.copy()
    other[1, 3, 2] ^= 1
    assert image != Image(other) and image != "image"
    strided = np.repeat(rgb, 2, axis=0)[::2]
    assert not strided.flags.c_contiguous and Image(strided) == image
    with pytest.raises(ValueError, match="read-only"):
        image.rgb[0, 0, 0] = 1


def test_messages_and_tasks() -> None:
    (message,) = TASK.messages
    assert message.text == "Which way?" and message.images == (BLACK,)
    both = dataclasses.replace(TASK, messages=(Message("system", ("x",)), message, message))
    assert both.images == (BLACK, BLACK)


SEGMENTS = (
    prompt(1, 80, 80, 80, 80, 2, images=(FOUR,)),
    action(3, 90, version=5),
    observation(4, 80, 80, 80, 80, images=(FOUR,)),
    action(6, version=7),
)


@pytest.mark.parametrize(
    ("trained", "mask", "logprobs", "versions"),
    [
        ((1, 3), [0] * 6 + [1, 1] + [0] * 5 + [1], [-0.3, -9.0, -0.6], [5, 5, 7]),
        ((1,), [0] * 6 + [1, 1] + [0] * 6, [-0.3, -9.0], [5, 5]),
        ((3,), [0] * 13 + [1], [-0.6], [7]),
        ((), [0] * 14, [], []),
    ],
)
def test_arrays_of_a_sample(trained: tuple, mask: list, logprobs: list, versions: list) -> None:
    sample = Sample("s", "g", SEGMENTS, trained, 0.0, 0.0, "e")
    assert sample.token_ids == [1, 80, 80, 80, 80, 2, 3, 90, 4, 80, 80, 80, 80, 6]
    assert sample.loss_mask == [bool(flag) for flag in mask]
    assert sample.behaviour_logprobs == pytest.approx(logprobs)
    assert sample.weight_versions == versions
    assert sample.images == (FOUR, FOUR)
    assert len(sample) == 14


def test_only_actions_are_trained() -> None:
    for index in (0, 2):
        with pytest.raises(ValueError, match=f"sample s: segment {index} is trained but was not sampled"):
            Sample("s", "g", SEGMENTS, (1, index), 0.0, 0.0, "e")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=6))
@settings(max_examples=40)
def test_derived_arrays_have_one_entry_for_each_trained_token(spec: list[tuple[bool, int]]) -> None:
    segments = tuple((action if sampled else observation)(*range(1, n + 1)) for sampled, n in spec)
    sample = Sample("s", "g", segments, tuple(i for i, (sampled, _) in enumerate(spec) if sampled), 0.0, 0.0, "e")
    assert len(sample.loss_mask) == len(sample.token_ids) == len(sample) == sum(n for _, n in spec)
    assert sum(sample.loss_mask) == sample.n_trained == len(sample.behaviour_logprobs) == len(sample.weight_versions)
    picked = [token for token, kept in zip(sample.token_ids, sample.loss_mask, strict=True) if kept]
    assert [-token / 10 for token in picked] == sample.behaviour_logprobs


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(TASK, "step0/0/t", 3, turns, EpisodeStatus.MAX_TURNS)


def answered(solved: bool, reward: float = 0.0) -> Turn:
    return Turn((SEGMENTS[0],), action(3, reward=reward), "", Verdict(reward, solved))


CALLED = Turn((SEGMENTS[0],), action(3, reward=0.25), "")


def test_what_a_trajectory_says_about_itself() -> None:
    assert trajectory().id == "step0/0/t/3"
    for turns, solved, first in [
        ((), False, False),
        ((CALLED,), False, False),
        ((CALLED, answered(True)), True, True),
        ((answered(False), answered(True)), True, False),
        ((answered(True), answered(False)), True, True),
        ((answered(False), CALLED), False, False),
    ]:
        assert (trajectory(*turns).solved, trajectory(*turns).solved_first_try) == (solved, first)
    assert trajectory(CALLED, answered(True, 1.0)).turn_rewards == (0.25, 1.0)


def test_rewritten_turn() -> None:
    first, second = SEGMENTS[1], SEGMENTS[3]
    one = Turn(SEGMENTS[:1], first, "")
    two = Turn(SEGMENTS[:3], second, "")
    three = Turn((*SEGMENTS, observation(5)), action(7), "")
    assert trajectory().rewritten_turn() is None
    assert trajectory(one).rewritten_turn() is None
    assert trajectory(one, two, three).rewritten_turn() is None
    fresh = Turn((prompt(1, 2),), action(7), "")
    assert trajectory(fresh, two).rewritten_turn() == 1
    assert trajectory(one, two, fresh).rewritten_turn() == 2
    changed = change(first, logprobs=(-0.3, -9.5))
    assert trajectory(one, dataclasses.replace(two, context=(SEGMENTS[0], changed, SEGMENTS[2]))).rewritten_turn() == 1
    shorter = dataclasses.replace(two, context=SEGMENTS[:1])
    assert trajectory(one, shorter).rewritten_turn() == 1


@pytest.mark.parametrize("part", [None, 3, np.zeros((2, 2, 3), np.uint8), b"x"])
def test_a_message_refuses_what_nobody_would_see(part: object) -> None:
    with pytest.raises(ValueError, match=f"is a str or an Image, not {type(part).__name__}; convert it"):
        Message("user", ("Which way?", part))  # type: ignore[arg-type]
