"""Command `npu-vlrl export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_vlrl.commands.options import Commands
from npu_vlrl.config import ConfigError


def add(commands: Commands) -> None:
    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    export.add_argument("source", metavar="RUN", type=Path, help="run folder; with --base a checkpoint, see below")
    export.add_argument("--out", required=True, metavar="DIR", type=Path, help="folder to write; it appears whole")
    export.add_argument("--checkpoint", metavar="STEP|PATH", help="of the run; the newest one where this is left out")
    export.add_argument("--adapter", action="store_true", help="LoRA as a folder of peft, not merged")
    export.add_argument(
        "--base",
        metavar="DIR",
        type=Path,
        help="RUN is a checkpoint of another program (Megatron, DCP in safetensors); this is its model's folder",
    )
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from npu_vlrl.export.foreign import convert
    from npu_vlrl.export.run import export_run

    if options.base is not None and (options.checkpoint is not None or options.adapter):
        raise ConfigError("--checkpoint and --adapter are for runs; leave them out, or --base")
    try:
        if options.base is not None:
            told = convert(options.source, options.base, options.out)
        else:
            told = export_run(options.source, options.out, options.checkpoint, options.adapter)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: {error}") from error
    print(f"{told}\nwritten to {options.out}")
