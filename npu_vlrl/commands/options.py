"""Arguments shared by the commands that take a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from npu_vlrl.cluster import drives
from npu_vlrl.common.exit_codes import DONE
from npu_vlrl.config import Config, load_config

Commands = Any
"""Type of the result of `ArgumentParser.add_subparsers`, whose class has no public name."""


def add_config(command: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds `--config` and overrides."""
    command.add_argument(
        "--config", required=required, action="append", metavar="FILE", help="YAML file; of several a later one wins"
    )
    command.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.steps=10")


def add_configured(
    commands: Commands, name: str, text: str, run: Callable[..., object], required: bool = True
) -> argparse.ArgumentParser:
    """Adds a command that takes a configuration file, or may do without one, and overrides of it."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    add_config(command, required)
    command.add_argument("--run-dir", metavar="DIR", help="the same as run.dir=DIR")
    command.set_defaults(run=run)
    return command


def load(options: argparse.Namespace) -> Config:
    """Loads the configuration that the arguments of `add_configured` name."""
    directory = [f"run.dir={options.run_dir}"] if getattr(options, "run_dir", None) else []
    return load_config(options.config, [*directory, *options.overrides])


def run_placed(config: Config, command: str, run: Callable[[Config], object]) -> int:
    """Runs a command in processes that Ray places, or in this one. Returns the exit code."""
    from npu_vlrl.cluster.driver import drive

    if drives(config):
        return drive(config, command)
    run(config)
    return DONE
