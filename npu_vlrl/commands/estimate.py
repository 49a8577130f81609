"""Command `npu-vlrl estimate`."""

from __future__ import annotations

import argparse

from npu_vlrl.commands.options import Commands, add_config, load
from npu_vlrl.common.exit_codes import DONE, FAILED
from npu_vlrl.config import ConfigError


def add(commands: Commands) -> None:
    command = commands.add_parser("estimate", help="memory and time of a run, before it is started")
    add_config(command)
    command.add_argument(
        "--device", metavar="NAME", help="e.g. 910B2, 910C, A100-80GB, H200; without it, this machine's"
    )
    command.add_argument("--devices", type=int, metavar="N", help="how many, each with a process; default 1")
    command.add_argument("--image", default="640x480", metavar="WxH", help="size of images in pixels")
    command.add_argument("--picture", help=argparse.SUPPRESS)
    command.add_argument("--turns", type=int, metavar="N", help="of an episode; default workflow.max_turns")
    command.add_argument("--sampled", type=int, metavar="N", help="tokens of a turn; default workflow.turn_tokens")
    command.set_defaults(run=_estimate)


def _estimate(options: argparse.Namespace) -> int:
    from npu_vlrl.estimate.report import estimate, lines, named_device

    if options.picture is not None:
        raise ConfigError(f"--picture is now --image; write --image {options.picture}")
    config = load(options)
    processes = options.devices or config.ray.processes or 1
    for name in ("devices", "turns", "sampled"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise ConfigError(f"--{name} must be at least 1, got {number}")
    found = estimate(
        config, named_device(options.device), processes, _size(options.image), options.turns, options.sampled
    )
    print("\n".join(lines(found, processes)))
    return FAILED if found.fits is False else DONE


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ConfigError(f"--image {text}: write width and height in pixels, e.g. 640x480")
    return int(width), int(height)
