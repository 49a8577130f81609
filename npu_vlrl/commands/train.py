"""`npu-vlrl train`, and `npu-vlrl config`, which shows what it would do."""

from __future__ import annotations

import argparse

from npu_vlrl.commands.options import Commands, add_configured, load, run_placed
from npu_vlrl.config import dump_config


def add(commands: Commands) -> None:
    add_configured(commands, "train", "train a model", _train)
    add_configured(commands, "config", "show the resolved configuration", _config)


def _train(options: argparse.Namespace) -> int:
    from npu_vlrl.train import train

    return run_placed(load(options), "train", train)


def _config(options: argparse.Namespace) -> None:
    print(dump_config(load(options)), end="")
