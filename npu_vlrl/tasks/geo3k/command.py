"""Command `npu-vlrl data geo3k`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from npu_vlrl.config import ConfigError

HELP = "60 real geometry problems as parquet in verl's schema"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source", metavar="DIR", type=Path, help="folder with problems.jsonl and images/ of other ones"
    )
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--eval-share", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Iterator[str]:
    from npu_vlrl.tasks.geo3k.data import SAMPLE, convert

    if not 0 <= options.eval_share < 1:
        raise ConfigError(f"--eval-share must be at least 0 and below 1, got {options.eval_share}")
    converted = convert(options.source or SAMPLE, Path(options.out), options.eval_share, options.seed)
    for name, value in converted.items():
        yield f"{name}: {value}"
