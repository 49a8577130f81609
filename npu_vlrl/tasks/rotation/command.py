"""Command `npu-vlrl data rotation`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from npu_vlrl.config import ConfigError

HELP = "turned photographs as parquet in verl's schema"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--photos", metavar="DIR", type=Path, help="upright .jpg, .png, .webp files, also below; else four samples"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for train.parquet and test.parquet")
    parser.add_argument("--per-photo", type=int, default=1, metavar="N", help="images made of each photograph")
    parser.add_argument(
        "--angles", nargs="+", default=["continuous"], metavar="WORD", help="continuous, or multiples-of K degrees"
    )
    parser.add_argument("--size", type=int, default=224, metavar="N", help="largest side of the images in pixels")
    parser.add_argument("--eval-share", type=float, default=0.25, help="share of the photographs for test.parquet")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Iterator[str]:
    from npu_vlrl.tasks.rotation.data import CONTINUOUS, PHOTOS, convert

    match options.angles:
        case ["continuous"]:
            step = CONTINUOUS
        case ["multiples-of", degrees] if degrees.isdecimal():
            step = float(degrees)
        case words:
            raise ConfigError(f"--angles must be continuous, or multiples-of K, got {' '.join(words)!r}")
    photos, out = options.photos or PHOTOS, Path(options.out)
    try:
        report = convert(photos, out, options.per_photo, step, options.size, options.eval_share, options.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    yield f"photos: {report.photos}, train: {report.rows['train']} rows, test: {report.rows['test']} rows"
    for what, names in (("equal to another", report.duplicates), ("skipped", report.skipped)):
        yield f"{what}: {len(names)}"
        for name, reason in names.items():
            yield f"  {name}: {reason}"
