"""`npu-vlrl train | eval | play | config | doctor | data …`: words to one function call, errors to exit codes.

Exit codes: 0 done, 1 the run failed, 2 bad input or missing hardware (one message that says what to change), 130 a
training was ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from npu_vlrl import __version__
from npu_vlrl.cluster import drives
from npu_vlrl.config import Config, ConfigError, dump_config, load_config
from npu_vlrl.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    options = _parse(arguments)
    from npu_vlrl.hardware import HardwareError
    from npu_vlrl.interrupt import Interrupted
    from npu_vlrl.learner.checkpoint import CheckpointError
    from npu_vlrl.learner.trainer import LearnerError
    from npu_vlrl.report.console import printable
    from npu_vlrl.rollout.collect import RolloutError
    from npu_vlrl.rollout.rounds import EngineError
    from npu_vlrl.sync.weights import SyncError
    from npu_vlrl.sync.world import PeerError, leave, started_processes
    from npu_vlrl.types import DataError

    try:
        return options.run(options) or DONE
    except (ConfigError, DataError, HardwareError, CheckpointError) as error:
        print(f"npu-vlrl: {printable(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except Interrupted as end:
        print(f"npu-vlrl: {end}", file=sys.stderr)
        return INTERRUPTED
    except (EngineError, LearnerError, PeerError, RolloutError, SyncError) as error:
        print(f"npu-vlrl: the run failed: {printable(str(error))}", file=sys.stderr)
        return FAILED if started_processes() == 1 else leave(FAILED)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere, also between options, which argparse alone does not allow."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="npu-vlrl", description="Train vision-language models by multi-turn RL.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("train", _train, "train a model"),
        ("eval", _eval, "play the evaluation tasks without learning"),
        ("config", _config, "show the resolved configuration"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", required=True, metavar="FILE", help="YAML file")
        command.add_argument("--run-dir", metavar="DIR", help="the same as run.dir=DIR")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.steps=10")
        command.set_defaults(run=run)
    player = commands.add_parser("play", help="act in an environment yourself")
    world = player.add_mutually_exclusive_group(required=True)
    world.add_argument("--environment", metavar="NAME", help="a game, e.g. sokoban, or path/to/file.py:function")
    world.add_argument("--config", metavar="FILE", help="YAML file; its data.train has the tasks")
    player.add_argument(
        "--option", action="append", default=[], metavar="key=value", help="of the environment, e.g. size=5"
    )
    player.add_argument("--seed", type=int, metavar="N", help="the same as train.seed=N")
    player.add_argument("--task", type=int, default=0, metavar="N", help="number of the task; the first one is 0")
    player.add_argument("--images", metavar="DIR", help="folder to write the pictures to")
    player.add_argument("--show", action="store_true", help="show pictures in the terminal also with --images")
    player.add_argument("overrides", nargs="*", metavar="key=value", help="with --config, e.g. workflow.max_turns=5")
    player.set_defaults(run=_play)
    doctor = commands.add_parser("doctor", help="show what this machine offers, and try devices, kernels, collectives")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(run=_doctor)
    data = commands.add_parser("data", help="prepare data")
    kinds = data.add_subparsers(required=True, metavar="KIND")
    geo3k = kinds.add_parser("geo3k", help="60 real geometry problems as parquet in verl's schema")
    geo3k.add_argument("--source", default="examples/geo3k_sample", help="folder with problems.jsonl and images/")
    geo3k.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    geo3k.add_argument("--eval-share", type=float, default=0.25)
    geo3k.add_argument("--seed", type=int, default=0)
    geo3k.set_defaults(run=_geo3k)
    rotation = kinds.add_parser("rotation", help="turned photographs as parquet in verl's schema")
    rotation.add_argument("--photos", required=True, metavar="DIR", help="upright .jpg, .png, .webp files, also below")
    rotation.add_argument("--out", required=True, metavar="DIR", help="folder for train.parquet and test.parquet")
    rotation.add_argument("--per-photo", type=int, default=1, metavar="N", help="pictures made of each photograph")
    rotation.add_argument(
        "--angles", nargs="+", default=["continuous"], metavar="WORD", help="continuous, or multiples-of K degrees"
    )
    rotation.add_argument("--size", type=int, default=224, metavar="N", help="largest side of the pictures in pixels")
    rotation.add_argument("--eval-share", type=float, default=0.25, help="share of the photographs for test.parquet")
    rotation.add_argument("--seed", type=int, default=0)
    rotation.set_defaults(run=_rotation)
    return parser


def _load(options: argparse.Namespace) -> Config:
    directory = [f"run.dir={options.run_dir}"] if options.run_dir else []
    return load_config(options.config, [*directory, *options.overrides])


def _train(options: argparse.Namespace) -> int:
    from npu_vlrl.train import train

    return _placed(options, "train", train)


def _eval(options: argparse.Namespace) -> int:
    from npu_vlrl.run import evaluate_only

    return _placed(options, "eval", evaluate_only)


def _placed(options: argparse.Namespace, command: str, run: Callable[[Config], object]) -> int:
    """In processes that Ray places, or here."""
    from npu_vlrl.cluster.driver import drive

    config = _load(options)
    if drives(config):
        return drive(config, command)
    run(config)
    return DONE


def _play(options: argparse.Namespace) -> None:
    from npu_vlrl.play import environment_config, play

    for name in ("task", "seed"):
        if (number := getattr(options, name) or 0) < 0:
            raise ConfigError(f"--{name} must be at least 0, got {number}")
    show = options.show or (sys.stdout.isatty() and options.images is None)
    images = Path(options.images) if options.images is not None else None
    if options.environment is not None:
        if options.overrides:
            raise ConfigError(f"{options.overrides[0]} changes a configuration; with --environment use --option")
        config = environment_config(options.environment, options.option, options.seed or 0)
        play(config, options.task, images, show, max_turns=None)
    else:
        if options.option:
            raise ConfigError(
                f"--option {options.option[0]}: with --config write environment.options.{options.option[0]}"
            )
        seed = [] if options.seed is None else [f"train.seed={options.seed}"]
        config = load_config(options.config, [*options.overrides, *seed])
        play(config, options.task, images, show, config.workflow.max_turns)


def _config(options: argparse.Namespace) -> None:
    print(dump_config(_load(options)), end="")


def _doctor(options: argparse.Namespace) -> int:
    from npu_vlrl.doctor import doctor

    return doctor(options.json)


def _geo3k(options: argparse.Namespace) -> None:
    from npu_vlrl.data.geo3k import convert

    if not 0 <= options.eval_share < 1:
        raise ConfigError(f"--eval-share must be at least 0 and below 1, got {options.eval_share}")
    try:
        converted = convert(Path(options.source), Path(options.out), options.eval_share, options.seed)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    for name, value in converted.items():
        print(f"{name}: {value}")


def _rotation(options: argparse.Namespace) -> None:
    from npu_vlrl.data.rotation import CONTINUOUS, convert
    from npu_vlrl.report.console import printable

    match options.angles:
        case ["continuous"]:
            step = CONTINUOUS
        case ["multiples-of", degrees] if degrees.isdecimal():
            step = float(degrees)
        case words:
            raise ConfigError(f"--angles must be continuous, or multiples-of K, got {' '.join(words)!r}")
    photos, out = Path(options.photos), Path(options.out)
    try:
        report = convert(photos, out, options.per_photo, step, options.size, options.eval_share, options.seed)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"photos: {report.photos}, train: {report.rows['train']} rows, test: {report.rows['test']} rows")
    for what, names in (("equal to another", report.duplicates), ("skipped", report.skipped)):
        print(f"{what}: {len(names)}")
        for name, reason in names.items():
            print(printable(f"  {name}: {reason}"))
