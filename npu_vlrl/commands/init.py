"""Command `npu-vlrl init`."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_vlrl.commands.options import Commands
from npu_vlrl.config import ConfigError


def add(commands: Commands) -> None:
    command = commands.add_parser("init", help="write a first configuration that fits this machine, or another")
    command.add_argument("--task", default="rotation", metavar="NAME", help="rotation, geo3k, sokoban or own-data")
    command.add_argument("--model", metavar="DIR", help="a Hugging Face folder; else the largest known one that fits")
    command.add_argument("--platform", metavar="NAME", help="of this machine; else the first that is usable")
    command.add_argument("--device", metavar="NAME", help="of another machine, e.g. 910B2, 910C, A100-80GB, H200")
    command.add_argument("--devices", type=int, metavar="N", help="how many to use; else all that this machine has")
    command.add_argument("--out", metavar="FILE", help="default TASK.yaml; a file that is there is never replaced")
    command.set_defaults(run=_init)


def _init(options: argparse.Namespace) -> None:
    from npu_vlrl.estimate.init_config import machine, next_steps, starter

    if options.devices is not None and options.devices < 1:
        raise ConfigError(f"--devices must be at least 1, got {options.devices}")
    out = Path(options.out or f"{options.task}.yaml")
    device, devices = machine(options.platform, options.device, options.devices)
    try:
        made = starter(options.task, device, devices, options.model, out)
    except OSError as error:
        raise ConfigError(f"--out: {error}; choose another file") from error
    print(f"wrote {out}: {made.chosen}\nnext:")
    for line in next_steps(options.task, made, out, options.device):
        print(f"  {line}")
