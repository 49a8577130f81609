"""Command `npu-vlrl train`, and `npu-vlrl config`, which shows the resolved configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_vlrl.cluster import drives
from npu_vlrl.commands.options import Commands, add_configured, load, run_placed
from npu_vlrl.common.exit_codes import DONE
from npu_vlrl.config import ConfigError, dump_config


def add(commands: Commands) -> None:
    trainer = add_configured(commands, "train", "train a model", _train)
    half = trainer.add_mutually_exclusive_group()
    half.add_argument("--debug-rollout-only", action="store_true", help="play and record; nothing is learned")
    half.add_argument("--debug-train-only", metavar="RUN", help="learn from what that run recorded; nothing is sampled")
    add_configured(commands, "config", "show the resolved configuration", _config).set_defaults(light=True)


def _train(options: argparse.Namespace) -> int:
    from npu_vlrl.commands.debug import rollout_only, train_only
    from npu_vlrl.train_loop import train

    config = load(options)
    if not options.debug_rollout_only and options.debug_train_only is None:
        return run_placed(config, "train", train)
    if drives(config):
        raise ConfigError("one half of a training alone is for the processes that you start; set ray.processes=0")
    if options.debug_rollout_only:
        rollout_only(config)
    else:
        train_only(config, Path(options.debug_train_only))
    return DONE


def _config(options: argparse.Namespace) -> None:
    config = load(options)
    given = config.algorithm
    filled = {key: value for key, value in given.resolved() if getattr(given, key) is None}
    print(dump_config(config), end="")
    for key, value in filled.items():
        if value is not None:  # the estimator has no such setting
            print(f"# algorithm.preset={given.preset} sets algorithm.{key}={str(value).lower()}")
