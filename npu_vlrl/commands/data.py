"""`npu-vlrl data …`: prepares data, and looks at it."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_vlrl.commands.options import Commands, add_config, load
from npu_vlrl.config import ConfigError
from npu_vlrl.exit_codes import BAD_INPUT, DONE

BENCHMARKS = ("mathvista", "mathverse", "chartqa", "mme", "mmstar", "gpqa", "aime", "math500")


def add(commands: Commands) -> None:
    data = commands.add_parser("data", help="prepare data, or check it")
    kinds = data.add_subparsers(required=True, metavar="KIND")
    check = kinds.add_parser("check", help="read all tasks of a configuration, and say which a training cannot use")
    add_config(check)
    check.add_argument("--limit", type=int, metavar="N", help="look at the first N usable rows of each source only")
    check.set_defaults(run=_check)
    geo3k = kinds.add_parser("geo3k", help="60 real geometry problems as parquet in verl's schema")
    geo3k.add_argument(
        "--source", metavar="DIR", type=Path, help="folder with problems.jsonl and images/ of other ones"
    )
    geo3k.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    geo3k.add_argument("--eval-share", type=float, default=0.25)
    geo3k.add_argument("--seed", type=int, default=0)
    geo3k.set_defaults(run=_geo3k)
    rotation = kinds.add_parser("rotation", help="turned photographs as parquet in verl's schema")
    rotation.add_argument(
        "--photos", metavar="DIR", type=Path, help="upright .jpg, .png, .webp files, also below; else four samples"
    )
    rotation.add_argument("--out", required=True, metavar="DIR", help="folder for train.parquet and test.parquet")
    rotation.add_argument("--per-photo", type=int, default=1, metavar="N", help="pictures made of each photograph")
    rotation.add_argument(
        "--angles", nargs="+", default=["continuous"], metavar="WORD", help="continuous, or multiples-of K degrees"
    )
    rotation.add_argument("--size", type=int, default=224, metavar="N", help="largest side of the pictures in pixels")
    rotation.add_argument("--eval-share", type=float, default=0.25, help="share of the photographs for test.parquet")
    rotation.add_argument("--seed", type=int, default=0)
    rotation.set_defaults(run=_rotation)
    benchmark = kinds.add_parser("benchmark", help="a published benchmark as parquet in verl's schema")
    benchmark.add_argument("name", metavar="NAME", help="one of " + ", ".join(BENCHMARKS))
    benchmark.add_argument("--source", required=True, metavar="PATH", help="file of the benchmark, or a folder of them")
    benchmark.add_argument(
        "--images", metavar="DIR", help="folder of pictures that rows name; default: beside the file"
    )
    benchmark.add_argument("--out", required=True, metavar="DIR", help="folder for NAME.parquet")
    benchmark.add_argument("--seed", type=int, default=0, help="of the order of GPQA's options")
    benchmark.set_defaults(run=_benchmark)


def _check(options: argparse.Namespace) -> int:
    from npu_vlrl.check_data import check
    from npu_vlrl.report.console import printable

    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {options.limit}")
    config, sources = load(options), []
    for found in check(config, options.limit):
        sources.append(found)
        for line in found.lines(config.workflow.context_tokens):
            print(printable(line), flush=True)
    for found in sources:
        for line in found.ignored():
            print(printable(f"{found.name}: {line}"), flush=True)
    return DONE if all(found.good_enough for found in sources) else BAD_INPUT


def _geo3k(options: argparse.Namespace) -> None:
    from npu_vlrl.data.geo3k import SAMPLE, convert

    if not 0 <= options.eval_share < 1:
        raise ConfigError(f"--eval-share must be at least 0 and below 1, got {options.eval_share}")
    try:
        converted = convert(options.source or SAMPLE, Path(options.out), options.eval_share, options.seed)
    except OSError as error:
        raise ConfigError(f"--out: {error}; choose another folder") from error
    for name, value in converted.items():
        print(f"{name}: {value}")


def _rotation(options: argparse.Namespace) -> None:
    from npu_vlrl.data.rotation import CONTINUOUS, PHOTOS, convert
    from npu_vlrl.report.console import printable

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
    except OSError as error:
        raise ConfigError(f"--out: {error}; choose another folder") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"photos: {report.photos}, train: {report.rows['train']} rows, test: {report.rows['test']} rows")
    for what, names in (("equal to another", report.duplicates), ("skipped", report.skipped)):
        print(f"{what}: {len(names)}")
        for name, reason in names.items():
            print(printable(f"  {name}: {reason}"))


def _benchmark(options: argparse.Namespace) -> None:
    from npu_vlrl.data.benchmarks import convert

    if options.name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {options.name!r}; choose one of {', '.join(BENCHMARKS)}")
    images = None if options.images is None else Path(options.images)
    try:
        file, rows = convert(options.name, Path(options.source), Path(options.out), images, options.seed)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    print(f"{file}: {rows} rows; judge them with reward.rule=benchmark")
