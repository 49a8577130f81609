"""Command `npu-vlrl data benchmark`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from npu_vlrl.config import ConfigError

HELP = "a published benchmark as parquet in verl's schema"

BENCHMARKS = ("mathvista", "mathverse", "chartqa", "mme", "mmstar", "gpqa", "aime", "math500")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="one of " + ", ".join(BENCHMARKS))
    parser.add_argument("--source", required=True, metavar="PATH", help="file of the benchmark, or a folder of them")
    parser.add_argument("--images", metavar="DIR", help="folder of images that rows name; default: beside the file")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for NAME.parquet")
    parser.add_argument("--seed", type=int, default=0, help="of the order of GPQA's options")


def run(options: argparse.Namespace) -> Iterator[str]:
    from npu_vlrl.tasks.benchmark.convert import convert

    if options.name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {options.name!r}; choose one of {', '.join(BENCHMARKS)}")
    images = None if options.images is None else Path(options.images)
    file, rows = convert(options.name, Path(options.source), Path(options.out), images, options.seed)
    yield f"{file}: {rows} rows; judge them with reward.rule=benchmark"
