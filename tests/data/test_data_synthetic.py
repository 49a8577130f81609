"""Generated tasks: seeded, independent of history, and with the right answer."""

from __future__ import annotations

import importlib.resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.data.source import TaskSource
from npu_vlrl.tasks.arrow import arrow_task
from npu_vlrl.tasks.episodes import episode_task
from npu_vlrl.tasks.photo import PHOTOS, load_photos, photo_task
from npu_vlrl.tasks.turned import DIRECTIONS
from npu_vlrl.types import Image


def test_the_photographs_are_there_with_their_licence() -> None:
    assert [photo.size for photo in load_photos()] == [(512, 512), (451, 300), (600, 400), (640, 427)]
    note = (importlib.resources.files("npu_vlrl.tasks") / "photos" / "LICENSE.txt").read_text()
    assert all(name in note for name in PHOTOS) and "CC0" in note and "public domain" in note


@pytest.mark.parametrize("kind", ["photo", "arrow"])
def test_the_message_shows_a_card_and_asks(kind: str) -> None:
    task = photo_task(3, 8, load_photos()) if kind == "photo" else arrow_task(3, 8)
    (message,) = task.messages
    card, question = message.parts
    assert (task.id, task.data_source, message.role) == (f"{kind}/3/8", kind, "user")
    assert isinstance(card, Image) and card.size == (28, 28) and len(np.unique(card.rgb.reshape(-1, 3), axis=0)) == 1
    wording = {"photo": "Which way is the top of the photo?", "arrow": "Which way does the arrow point?"}
    assert question == wording[kind] and task.answer in DIRECTIONS
    assert task.extra["hidden_image"].size == (56, 56)


def test_sizes_for_other_patches() -> None:
    for task in (photo_task(0, 0, load_photos(), size=64, card=32), arrow_task(0, 0, size=64, card=32)):
        assert task.images[0].size == (32, 32) and task.extra["hidden_image"].size == (64, 64)


def test_a_task_depends_on_seed_and_index_alone() -> None:
    photos = load_photos()
    for make in (lambda s, i: photo_task(s, i, photos), arrow_task):
        forward = [make(0, index) for index in range(6)]
        backward = [make(0, index) for index in reversed(range(6))]
        assert forward == backward[::-1]
        hidden = {task.extra["hidden_image"] for task in [*forward, *(make(1, index) for index in range(6))]}
        assert len(hidden) == 12


def test_answers_are_balanced() -> None:
    photos = load_photos()
    for make in (arrow_task, lambda s, i: photo_task(s, i, photos)):
        answers = [make(5, index).answer for index in range(400)]
        counts = [answers.count(direction) for direction in DIRECTIONS]
        assert sum(counts) == 400 and min(counts) > 65 and max(counts) < 135  # 100 +- 4 standard deviations


@given(seed=st.integers(0, 10**6), index=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_arrow_points_where_the_answer_says(seed: int, index: int) -> None:
    """The shaft's end is the only side of the arrow's bounding box that is dark over more than a corner."""
    task = arrow_task(seed, index)
    rgb = task.extra["hidden_image"].rgb.astype(int)
    dark = rgb.sum(axis=2) < 400
    assert np.all(rgb[~dark] >= 190) and np.all(rgb[dark] <= 90)
    rows, columns = np.nonzero(dark)
    assert min(rows.min(), columns.min()) > 0 and max(rows.max(), columns.max()) < 55
    ends = {
        "up": dark[rows.max()].sum(),
        "down": dark[rows.min()].sum(),
        "left": dark[:, columns.max()].sum(),
        "right": dark[:, columns.min()].sum(),
    }
    assert max(ends, key=lambda direction: ends[direction]) == task.answer
    off_centre = np.array([(rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2]) - 28
    assert np.all(np.abs(off_centre) <= 5)


@given(index=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_photos_top_is_where_the_answer_says(index: int) -> None:
    """An image with a bright top half; mirrored or not, its top stays its top."""
    rgb = np.full((160, 160, 3), 40, np.uint8)
    rgb[:80] = 160
    task = photo_task(0, index, [Image(rgb)])
    hidden = task.extra["hidden_image"].rgb[..., 0].astype(int)
    halves = {"up": hidden[:28], "down": hidden[28:], "left": hidden[:, :28], "right": hidden[:, 28:]}
    assert max(halves, key=lambda name: halves[name].sum()) == task.answer
    assert 0.69 * 160 <= hidden.max() <= 1.31 * 160 * 1.1  # the resize overshoots at an edge


def test_an_episode_is_a_seed() -> None:
    tasks = [episode_task("maze", seed, index) for seed in range(20) for index in range(50)]
    assert (tasks[51].id, tasks[51].data_source) == ("maze/1/1", "maze")
    assert all((task.messages, task.answer, set(task.extra)) == ((), None, {"seed"}) for task in tasks)
    seeds = [task.extra["seed"] for task in tasks]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 2**32 for seed in seeds)
    assert max(seeds) > 0.98 * 2**32 and min(seeds) < 0.02 * 2**32  # spread over the whole range
    assert episode_task("maze", 1, 1).extra == tasks[51].extra != episode_task("other", 1, 1).extra


def test_a_stream_of_episodes_goes_on_where_it_was_stopped() -> None:
    source = TaskSource.generated(lambda index: episode_task("maze", 3, index))
    source.next(5)
    again = TaskSource.generated(lambda index: episode_task("maze", 3, index))
    again.load_state_dict(source.state_dict())
    assert again.next(4) == source.next(4)
    with pytest.raises(ValueError, match="belongs to other data"):
        TaskSource.generated(lambda index: episode_task("maze", 4, index)).load_state_dict(source.state_dict())


def test_half_of_the_photos_are_mirrored_before_turning() -> None:
    rgb = np.full((160, 160, 3), 40, np.uint8)
    rgb[:80] = 120
    rgb[:, :80, 1] += 60  # green marks the left side
    mirrored = 0
    for index in range(200):
        task = photo_task(1, index, [Image(rgb)])
        upright = np.rot90(task.extra["hidden_image"].rgb, DIRECTIONS.index(task.answer or ""))
        green = upright[..., 1].astype(int) - upright[..., 0]
        mirrored += bool(green[:, 28:].sum() > green[:, :28].sum())
    assert 70 <= mirrored <= 130


def test_crops_are_between_112_and_160_of_160_pixels() -> None:
    """On an image that is a ramp from left to right, the range of levels tells the width of the crop."""
    ramp = np.broadcast_to(np.arange(160, dtype=np.uint8)[None, :, None], (160, 160, 3)).copy()
    widths = []
    for index in range(150):
        hidden = photo_task(2, index, [Image(ramp)]).extra["hidden_image"].rgb[..., 0].astype(float)
        step = max(np.abs(np.diff(hidden, axis=k)).mean() for k in (0, 1))  # levels a pixel, times the brightness
        widths.append(step * 56)
    assert 0.7 * 112 * 0.95 < min(widths) < 95 and 175 < max(widths) < 1.3 * 160 * 1.05
