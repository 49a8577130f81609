"""Command `npu-vlrl play`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from npu_vlrl.commands.options import Commands
from npu_vlrl.config import ConfigError, load_config


def add(commands: Commands) -> None:
    player = commands.add_parser("play", help="act in an environment yourself")
    world = player.add_mutually_exclusive_group(required=True)
    world.add_argument("--environment", metavar="NAME", help="a game, e.g. sokoban, or path/to/file.py:function")
    world.add_argument("--config", action="append", metavar="FILE", help="YAML file; its data.train has the tasks")
    player.add_argument(
        "--option", action="append", default=[], metavar="key=value", help="of the environment, e.g. size=5"
    )
    player.add_argument("--seed", type=int, metavar="N", help="the same as train.seed=N")
    player.add_argument("--task", type=int, default=0, metavar="N", help="number of the task; the first one is 0")
    player.add_argument("--images", metavar="DIR", help="folder to write the images to")
    player.add_argument("--show", action="store_true", help="show images in the terminal also with --images")
    player.add_argument("overrides", nargs="*", metavar="key=value", help="with --config, e.g. workflow.max_turns=5")
    player.set_defaults(run=_play)


def _play(options: argparse.Namespace) -> None:
    from npu_vlrl.preview.play import environment_config, play

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
