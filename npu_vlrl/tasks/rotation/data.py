"""Writes turned photographs from any folder as parquet in verl's schema. The answer turns one upright.

The angle is in degrees counter-clockwise, as the `rotate` tool takes it: the photograph was turned clockwise by it.
Only the content may reveal it. Therefore every image is a square that lies wholly inside the turned photograph, of the
same size at any angle: there are no empty corners, and neither shape nor scale depends on the angle. The photographs
must stand upright themselves.
"""

from __future__ import annotations

import io
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from npu_vlrl.data.columns import IMAGE_TAG
from npu_vlrl.data.images import read_image
from npu_vlrl.data.records import written_schema
from npu_vlrl.types import DataError, Image

PHOTOS = Path(__file__).parents[1] / "photos"
"""Folder of the four photographs of the package."""

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")

SMALLEST = 28
"""Minimum side of an image, in pixels."""

CONTINUOUS = 0.1
"""Step of angles drawn continuously, in degrees; finer than an eye can tell."""

DIRECTION = "counter-clockwise"
"""Direction in which the answer turns the image upright."""

QUESTION = (
    f"{IMAGE_TAG}This photo was turned. By how many degrees {DIRECTION} must it be rotated to stand upright? "
    "Give a number from 0 to 360, such as <answer>90</answer>."
)

SCHEMA = written_schema({name: pa.string() for name in ("id", "split", "photo", "direction")} | {"angle": pa.float64()})

_ROW_GROUP = 64


@dataclass
class Report:
    """Counts of a conversion: images written, photographs used, and files left out."""

    rows: dict[str, int] = field(default_factory=lambda: {"train": 0, "test": 0})
    photos: int = 0
    """Number of different photographs that are used."""
    duplicates: dict[str, str] = field(default_factory=dict)
    """Photographs left out as duplicates, with the one that each is equal to."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Files left out, with the fault of each."""


def convert(photos: Path, out: Path, per_photo: int, step: float, size: int, eval_share: float, seed: int) -> Report:
    """Writes out/train.parquet and out/test.parquet from the photographs in the folder `photos` and its subfolders.

    Each photograph gives `per_photo` images (see `turned`), at angles that are multiples of `step` degrees and depend
    on `seed` and its own pixels only. `eval_share` of the photographs, drawn by `seed`, go to the test file with all
    their images. Duplicates with equal pixels are used once. A file that cannot be used is skipped. Raises DataError
    when one of the two files would be empty unintentionally, and ValueError for a number out of range.
    """
    _check(per_photo, step, size, eval_share)
    report = Report()
    names = _names(photos, seed)
    out.mkdir(parents=True, exist_ok=True)
    with (
        pq.ParquetWriter(out / "train.parquet", SCHEMA) as train,
        pq.ParquetWriter(out / "test.parquet", SCHEMA) as test,
    ):
        writers = {"train": train, "test": test}
        waiting: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
        for photo, name in _different(photos, names, report):
            # of n photographs round(n * share) are held out; the order is random, so they may lie evenly among them
            held_out = int((report.photos + 1) * eval_share + 0.5) > int(report.photos * eval_share + 0.5)
            split = "test" if held_out else "train"
            report.photos += 1
            report.rows[split] += per_photo
            waiting[split] += _rows(photo, name, split, per_photo, step, size, seed)
            if len(waiting[split]) >= _ROW_GROUP:
                writers[split].write_table(pa.Table.from_pylist(waiting.pop(split), SCHEMA))
                waiting[split] = []
        for split, rows in waiting.items():
            writers[split].write_table(pa.Table.from_pylist(rows, SCHEMA))
    _check_result(report, photos, eval_share)
    return report


def turned(photo: Image, angle: float, size: int) -> Image:
    """Cuts the middle out of `photo`, turned clockwise by `angle` degrees: a square of `size` pixels.

    Its corners lie inside the photograph at any angle. It is smaller where the photograph would have to be enlarged.
    Raises DataError when it would be smaller than `SMALLEST`.
    """
    width, height = photo.size
    shorter = min(width, height)
    side = _side(photo, size)
    canvas = _canvas(side)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    square = PIL.Image.fromarray(photo.rgb).resize(
        (canvas, canvas), PIL.Image.Resampling.BICUBIC, (left, top, left + shorter, top + shorter)
    )
    edge = (canvas - side) // 2
    tilted = square.rotate(-angle % 360.0, PIL.Image.Resampling.BICUBIC)
    return Image(np.array(tilted.crop((edge, edge, edge + side, edge + side))))


def _canvas(side: int) -> int:
    """Side of the square in which a square of `side` pixels can be turned, with a pixel to spare for interpolation."""
    return side + 2 * math.ceil((math.sqrt(2) - 1) * side / 2 + 1)


def _side(photo: Image, size: int) -> int:
    """Side of the image from `photo`: the largest of at most `size` whose canvas needs no enlarging."""
    width, height = photo.size
    side = min(size, int(min(width, height) / math.sqrt(2)))
    while _canvas(side) > min(width, height):
        side -= 1
    if side < SMALLEST:
        raise DataError(f"it has {width}x{height} pixels; the shorter side must have at least {_canvas(SMALLEST)}")
    return side


def _check(per_photo: int, step: float, size: int, eval_share: float) -> None:
    if per_photo < 1:
        raise ValueError(f"per_photo must be at least 1, got {per_photo}")
    if step != CONTINUOUS and (step not in range(1, 181) or 360 % step):
        raise ValueError(f"angles must be multiples of a whole number of degrees that divides 360, not of {step:g}")
    if size < SMALLEST:
        raise ValueError(f"size must be at least {SMALLEST} pixels, got {size}")
    if not 0 <= eval_share < 1:
        raise ValueError(f"eval_share must be at least 0 and below 1, got {eval_share}")


def _names(photos: Path, seed: int) -> list[Path]:
    """Paths of photographs relative to the folder, in an order drawn by `seed`. Links to folders are not followed."""
    if not photos.is_dir():
        raise DataError(f"{photos}: there is no such folder; name the one that holds the photos")
    found = sorted(
        Path(folder, file).relative_to(photos)
        for folder, _, files in os.walk(photos)
        for file in files
        if file.lower().endswith(SUFFIXES)
    )
    if not found:
        raise DataError(f"{photos}: there is no {', '.join(SUFFIXES)} file in it or below; name another folder")
    random.Random(seed).shuffle(found)
    return found


def _different(photos: Path, names: list[Path], report: Report) -> Iterator[tuple[Image, str]]:
    """Yields the usable photographs, each once, with a name that is valid text; `report` notes the others."""
    first: dict[str, str] = {}
    for path in names:
        name = os.fsencode(path).decode("utf-8", "replace")
        try:
            photo = read_image(path, name, photos)
            _side(photo, SMALLEST)
        except (DataError, OSError) as error:
            report.skipped[name] = str(error).removeprefix(f"{name}: ")
            continue
        if photo.hash in first:
            report.duplicates[name] = first[photo.hash]
        else:
            first[photo.hash] = name
            yield photo, name


def _rows(
    photo: Image, name: str, split: str, per_photo: int, step: float, size: int, seed: int
) -> Iterator[dict[str, Any]]:
    draw = random.Random(f"{seed}/{photo.hash}")
    for number in range(per_photo):
        angle = round(draw.randrange(round(360 / step)) * step, 1)
        data = io.BytesIO()
        PIL.Image.fromarray(turned(photo, angle, size).rgb).save(data, "PNG")
        identity = f"{photo.hash[:16]}/{number}"
        yield {
            "data_source": "rotation",
            "prompt": [{"role": "user", "content": QUESTION}],
            "images": [{"bytes": data.getvalue(), "path": None}],
            "ability": "vision",
            "reward_model": {"style": "rule", "ground_truth": f"{angle:g}"},
            "extra_info": {"id": identity, "split": split, "photo": name, "direction": DIRECTION, "angle": angle},
        }


def _check_result(report: Report, photos: Path, eval_share: float) -> None:
    if not report.photos:
        name, reason = next(iter(report.skipped.items()))
        raise DataError(
            f"{photos}: none of its {len(report.skipped)} photos can be used; the first one, {name}: {reason}"
        )
    if not report.rows["train"] or (eval_share and not report.rows["test"]):
        empty = "test" if report.rows["train"] else "train"
        raise DataError(
            f"{photos}: of {report.photos} different photos none is left for {empty}.parquet; add some, or "
            f"change the share of {eval_share} that is held out"
        )
