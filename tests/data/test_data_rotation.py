"""Turned photographs: what is stored turns them back, nothing else tells the angle, no photo is on both sides."""

from __future__ import annotations

import asyncio
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.data.records import load_tasks
from npu_vlrl.tasks.photo import load_photos
from npu_vlrl.tasks.rotation.data import CONTINUOUS, Report, convert, turned
from npu_vlrl.types import DataError, Image, Message, Task, ToolCall
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.tools import Toolbox, ToolContext

ROOT = Path(__file__).parents[2]
PHOTOS = ROOT / "npu_vlrl/tasks/photos"
PORTRAIT = ROOT / "tests/assets/exif/Portrait_6.jpg"


def noise(folder: Path, count: int, side: int = 60, seed: int = 0) -> list[Path]:
    """Different small images."""
    files = []
    for number in range(count):
        pixels = np.random.default_rng([seed, number]).integers(0, 256, (side, side, 3), dtype=np.uint8)
        files.append(folder / f"{number}.png")
        PIL.Image.fromarray(pixels).save(files[-1])
    return files


def make(photos: Path, out: Path, **changes: Any) -> Report:
    given: dict[str, Any] = {"per_photo": 2, "step": CONTINUOUS, "size": 28, "eval_share": 0.25, "seed": 0}
    return convert(photos, out, **{**given, **changes})


def rows(out: Path, split: str) -> list[dict[str, Any]]:
    return list(pq.read_table(out / f"{split}.parquet").to_pylist())


def all_rows(out: Path) -> list[dict[str, Any]]:
    return rows(out, "train") + rows(out, "test")


def stored(row: dict[str, Any]) -> np.ndarray:
    """float [side, side, 3], decoded by Pillow alone."""
    with PIL.Image.open(io.BytesIO(row["images"][0]["bytes"])) as image:
        assert image.format == "PNG" and not image.getexif()
        return np.asarray(image).astype(float)


def in_circle(side: int) -> np.ndarray:
    """bool [side, side]: pixels in the inscribed circle, less a border that interpolation needs."""
    offsets = np.arange(side) + 0.5 - side / 2
    return np.hypot(offsets[:, None], offsets[None]) < side / 2 - 2


def rotated_by_the_tool(image: Image, angle: float) -> np.ndarray:
    task = Task("t", (Message("user", (image, "?")),), "0", "rotation")
    call = ToolCall("rotate", {"angle": angle, "expand": False})
    (shown,) = Toolbox(["rotate"]).run(call, ToolContext(task, task.images)).images
    return shown.rgb.astype(float)


def upright(photo: PIL.Image.Image, side: int, canvas: int) -> np.ndarray:
    """The middle of a photo as it was taken: `side` of the `canvas` pixels that its shorter side becomes."""
    kept = min(photo.size) * side / canvas
    left, top = (photo.width - kept) / 2, (photo.height - kept) / 2
    box = (left, top, left + kept, top + kept)
    return np.asarray(photo.convert("RGB").resize((side, side), PIL.Image.Resampling.BICUBIC, box)).astype(float)


def test_the_rotate_tool_turns_every_image_back_by_its_answer(tmp_path: Path) -> None:
    """84 pixels of a canvas of 84 + 2 * ceil(0.41421 * 42 + 1) = 122, inside the inscribed circle."""
    assert make(PHOTOS, tmp_path, size=84, per_photo=6).rows == {"train": 18, "test": 6}
    circle = in_circle(84)
    for split in ("train", "test"):
        tasks = load_tasks(tmp_path / f"{split}.parquet")
        for task in map(tasks.__getitem__, range(len(tasks))):
            with PIL.Image.open(PHOTOS / task.extra["photo"]) as photo:
                before = upright(photo, 84, 122)[circle]
            (image,), angle = task.images, float(task.answer or "nan")
            assert image.size == (84, 84) and task.extra["angle"] == angle
            assert (task.extra["direction"], task.extra["split"]) == ("counter-clockwise", split)

            def off(by: float, image: Image = image, before: np.ndarray = before) -> float:
                return float(np.abs(rotated_by_the_tool(image, by)[circle] - before).mean())

            assert off(angle) < 4
            assert min(off(angle + 6), off(angle - 6), off(angle + 90), off(angle + 180)) > 3 * off(angle)
            if 5 < angle % 180 < 175:
                assert off(-angle) > 3 * off(angle), "the other direction is another answer"


def wave(x: Any, y: Any) -> Any:
    """A smooth pattern of one colour, without any symmetry, over source pixels."""
    return 128 + 60 * np.sin(0.05 * x + 0.02 * y) + 50 * np.cos(0.03 * y - 0.011 * x)


@given(st.integers(0, 3599).map(lambda tenths: tenths / 10), st.sampled_from([(164, 164), (200, 164), (164, 301)]))
@settings(max_examples=30, deadline=None)
def test_turned_clockwise_about_the_middle_by_the_formula(angle: float, size: tuple[int, int]) -> None:
    """56 pixels of a canvas of 56 + 2 * ceil(0.41421 * 28 + 1) = 82, from 164 pixels of the photo: 2 each."""
    y, x = np.mgrid[: size[1], : size[0]] + 0.5
    grey = np.rint(wave(x - size[0] / 2, y - size[1] / 2)).astype(np.uint8)
    image = turned(Image(np.repeat(grey[:, :, None], 3, axis=2)), angle, 56).rgb.astype(float)
    v, u = 2 * (np.mgrid[:56, :56] + 0.5 - 28)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    expected = wave(u * cos + v * sin, v * cos - u * sin)  # a point of the photo that a clockwise turn takes to (u, v)
    assert np.abs(image[:, :, 0] - expected).max() < 4
    if abs(sin) > 0.2:  # without a turn, and after a half one, both ways are one
        the_other_way = wave(u * cos - v * sin, v * cos + u * sin)
        assert np.abs(image[:, :, 0] - the_other_way).max() > 4


@given(st.floats(0, 360), st.integers(45, 400), st.integers(45, 400), st.integers(28, 200))
@settings(max_examples=50, deadline=None)
def test_no_corner_and_no_size_tells_the_angle(angle: float, width: int, height: int, size: int) -> None:
    white = Image(np.full((height, width, 3), 255, np.uint8))
    image = turned(white, angle, size)
    assert image.rgb.min() == 255, "what the photo does not show would be black"
    side, shorter = image.size[0], min(width, height)
    assert image.size == (side, side) == turned(white, 0, size).size
    assert side <= size and side * math.sqrt(2) + 2 <= shorter, "the corners fit, and nothing was enlarged"
    assert side == size or (side + 1) * math.sqrt(2) + 6 > shorter, "as large as it can be"


def test_without_the_crop_corners_would_tell() -> None:
    """The check of the test above can fail."""
    tilted = PIL.Image.new("RGB", (82, 82), "white").rotate(-30.0, PIL.Image.Resampling.BICUBIC)
    assert np.asarray(tilted.crop((13, 13, 69, 69))).min() == 255
    assert np.asarray(tilted.crop((7, 7, 75, 75))).min() == 0


def test_quarter_turns_are_exact(tmp_path: Path) -> None:
    report = make(PHOTOS, tmp_path, per_photo=12, step=90, size=60, eval_share=0)
    assert report.rows == {"train": 48, "test": 0}
    by_photo: dict[str, dict[int, np.ndarray]] = {}
    for row in all_rows(tmp_path):
        quarter, rest = divmod(row["extra_info"]["angle"], 90)
        assert rest == 0 and row["reward_model"]["ground_truth"] == str(int(90 * quarter))
        by_photo.setdefault(row["extra_info"]["photo"], {})[int(quarter)] = stored(row)
    assert len(by_photo) == 4 and {quarter for photo in by_photo.values() for quarter in photo} == {0, 1, 2, 3}
    for quarters in by_photo.values():
        restored = [np.rot90(image, quarter) for quarter, image in quarters.items()]  # numpy: counter-clockwise
        assert all(np.array_equal(image, restored[0]) for image in restored)


def test_continuous_angles_are_spread_evenly(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    noise(tmp_path / "in", 1)
    make(tmp_path / "in", tmp_path / "out", per_photo=800, eval_share=0)
    angles = [row["extra_info"]["angle"] for row in all_rows(tmp_path / "out")]
    counts = np.histogram(angles, bins=8, range=(0, 360))[0]
    assert counts.sum() == 800 and counts.min() > 60 and counts.max() < 140  # 100 expected, 9.4 standard deviation
    texts = [row["reward_model"]["ground_truth"] for row in all_rows(tmp_path / "out")]
    assert [float(text) for text in texts] == angles and max(map(len, texts)) == 5
    assert len(set(angles)) > 600


def test_rewards_agree_with_the_angle(tmp_path: Path) -> None:
    make(PHOTOS, tmp_path, eval_share=0)
    for row in all_rows(tmp_path):
        gold, angle = row["reward_model"]["ground_truth"], row["extra_info"]["angle"]
        task = Task("t", (), gold, "rotation")
        for rule, zero_at in (("rotation_broad", 180), ("rotation_strict", 45)):
            judge = make_judge(rule, {}, workers=1, deadline_s=5)
            judge.check_gold(gold)
            for said, off in ((gold, 0), (f"{angle + 9:.1f}", 9), (f"{angle - 360:.1f}", 0)):
                verdict = asyncio.run(judge.judge(task, f"<answer>{said}</answer>", ()))
                assert verdict.reward == pytest.approx(1 - off / zero_at) and verdict.solved == (off <= 5)


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """A folder with all that may lie in one."""
    folder = tmp_path / "album"
    (folder / "2024" / "spring").mkdir(parents=True)
    photos = load_photos()
    for number, name in enumerate(("a.PNG", "2024/b.png", "2024/spring/c.webp")):
        PIL.Image.fromarray(photos[number].rgb).save(folder / name, lossless=True)
    (folder / "2024" / "Portrait_6.jpg").write_bytes(PORTRAIT.read_bytes())
    PIL.Image.fromarray(photos[1].rgb).save(folder / "2024" / "spring" / "b_again.webp", lossless=True)
    rocket = (PHOTOS / "rocket.jpg").read_bytes()
    (folder / "cut.jpeg").write_bytes(rocket[: len(rocket) // 2])
    (folder / "empty.png").touch()
    (folder / "text.jpg").write_text("no photo")
    PIL.Image.new("RGB", (41, 300)).save(folder / "narrow.png")
    PIL.Image.new("RGB", (42, 300), "red").save(folder / "wide_enough.png")
    (folder / "outside.jpg").symlink_to(PHOTOS / "rocket.jpg")
    (folder / "LICENSE.txt").write_text("not looked at")
    return folder


def test_what_lies_in_a_folder(album: Path, tmp_path: Path) -> None:
    """28 pixels need 28 + 2 * ceil(0.41421 * 14 + 1) = 42."""
    report = make(album, tmp_path / "out")
    assert report.photos == 5 and sum(report.rows.values()) == 10
    used = {row["extra_info"]["photo"] for row in all_rows(tmp_path / "out")}
    (again, first), *more = report.duplicates.items()
    assert not more and {again, first} == {"2024/b.png", "2024/spring/b_again.webp"}
    assert used == {"a.PNG", first, "2024/spring/c.webp", "2024/Portrait_6.jpg", "wide_enough.png"}
    reasons = {
        "cut.jpeg": "the image is damaged or truncated",
        "empty.png": "the image has zero bytes",
        "text.jpg": "not an image that can be read",
        "narrow.png": "it has 41x300 pixels; the shorter side must have at least 42",
        "outside.jpg": "the image path 'outside.jpg' leaves",
    }
    assert report.skipped.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert report.skipped[name].startswith(reason)


def test_a_photo_is_turned_upright_by_its_exif_first(album: Path, tmp_path: Path) -> None:
    make(album, tmp_path / "out", size=56, step=90)
    with PIL.Image.open(PORTRAIT) as photo:
        taken, lying = upright(PIL.ImageOps.exif_transpose(photo), 56, 82), upright(photo, 56, 82)
    found = [row for row in all_rows(tmp_path / "out") if row["extra_info"]["photo"].endswith("Portrait_6.jpg")]
    assert len(found) == 2
    for row in found:
        restored = np.rot90(stored(row), row["extra_info"]["angle"] // 90)
        assert np.abs(restored - taken).mean() < 7 < 2 * 7 < np.abs(restored - lying).mean()


@given(st.integers(2, 9), st.floats(0, 0.9), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_the_share_is_kept_and_no_photo_is_on_both_sides(
    tmp_path_factory: pytest.TempPathFactory, count: int, share: float, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("photos")
    files = noise(folder, count)
    (folder / "copy.png").write_bytes(files[0].read_bytes())
    held_out = math.floor(count * share + 0.5)
    if held_out == count or (share and not held_out):
        with pytest.raises(DataError, match=f"of {count} different photos none is left for"):
            make(folder, folder / "out", eval_share=share, seed=seed)
        return
    report = make(folder, folder / "out", eval_share=share, seed=seed)
    assert report.rows == {"train": 2 * (count - held_out), "test": 2 * held_out}
    photos = {split: {row["extra_info"]["photo"] for row in rows(folder / "out", split)} for split in ("train", "test")}
    assert len(photos["test"]) == held_out and not photos["train"] & photos["test"]
    assert not {"0.png", "copy.png"} <= photos["train"] | photos["test"]


def test_a_seed_gives_one_result_and_a_photo_keeps_its_angles(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    files = noise(folder, 8)

    def angles(**changes: Any) -> dict[str, list[float]]:
        make(folder, tmp_path / "out", **changes)
        found: dict[str, list[float]] = {}
        for row in all_rows(tmp_path / "out"):
            found.setdefault(row["extra_info"]["id"].split("/")[0], []).append(row["extra_info"]["angle"])
        return found

    first = angles()
    table = {split: rows(tmp_path / "out", split) for split in ("train", "test")}
    assert angles() == first and {split: rows(tmp_path / "out", split) for split in table} == table
    assert [row["extra_info"]["id"] for rows_ in table.values() for row in rows_] != sorted(
        row["extra_info"]["id"] for rows_ in table.values() for row in rows_
    )
    other = angles(seed=1)
    assert other.keys() == first.keys() and all(other[photo] != first[photo] for photo in first)
    files[0].rename(folder / "renamed.png")
    noise(tmp_path / "in", 9)  # the ninth is new
    more = angles(per_photo=3)
    assert len(more) == 9 and all(more[photo][:2] == first[photo] for photo in first)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (file,) = noise(tmp_path / "in", 1)
    file.rename(tmp_path / "in" / "gr\udce4n.png")  # a byte that is not UTF-8, as Python spells it
    make(tmp_path / "in", tmp_path / "out", eval_share=0)
    assert {row["extra_info"]["photo"] for row in all_rows(tmp_path / "out")} == {"gr�n.png"}
    assert len(load_tasks(tmp_path / "out" / "train.parquet")[0].images) == 1


def test_folders_without_photos(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder; name the one that holds the photos"):
        make(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"there is no .jpg, .jpeg, .png, .webp file in it or below"):
        make(tmp_path, tmp_path / "out")
    (tmp_path / "a.jpg").touch()
    with pytest.raises(DataError, match=r"none of its 1 photos can be used; the first one, a.jpg: the image has zero"):
        make(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_photo": 0}, "per_photo must be at least 1, got 0"),
        ({"step": 7}, "a whole number of degrees that divides 360, not of 7"),
        ({"step": 360}, "not of 360"),
        ({"step": 0}, "not of 0"),
        ({"step": 0.5}, "not of 0.5"),
        ({"size": 27}, "size must be at least 28 pixels, got 27"),
        ({"eval_share": 1.0}, "eval_share must be at least 0 and below 1, got 1.0"),
        ({"eval_share": -0.1}, "got -0.1"),
    ],
)
def test_numbers_out_of_range(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(PHOTOS, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()
