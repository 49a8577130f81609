"""`npu-vlrl train | eval | config | doctor | data …`: parses words, calls one function, turns errors into exit codes.

Exit codes: 0 done, 1 the run failed, 2 bad input or missing hardware (one message that says what to change).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_vlrl import __version__
from npu_vlrl.config import Config, ConfigError, dump_config, load_config

DONE, FAILED, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    options = _parse(arguments)
    from npu_vlrl.hardware import HardwareError
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
    return parser


def _load(options: argparse.Namespace) -> Config:
    directory = [f"run.dir={options.run_dir}"] if options.run_dir else []
    return load_config(options.config, [*directory, *options.overrides])


def _train(options: argparse.Namespace) -> None:
    from npu_vlrl.train import train

    train(_load(options))


def _eval(options: argparse.Namespace) -> None:
    from npu_vlrl.run import evaluate_only

    evaluate_only(_load(options))


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
