"""Command `npu-vlrl eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_vlrl.commands.options import Commands, add_configured, load, run_placed
from npu_vlrl.common.exit_codes import DONE
from npu_vlrl.config import ConfigError


def add(commands: Commands) -> None:
    command = add_configured(commands, "eval", "play the evaluation tasks without learning, or compare", _eval, False)
    command.add_argument("--against", metavar="DIR", help="run folder of another finished evaluation to compare with")
    command.add_argument("--out", metavar="DIR", help="folder for the comparison, by default RUN/against/NAME")


def _eval(options: argparse.Namespace) -> int:
    """Evaluates and compares. Without a configuration the run folder's finished evaluation is only compared."""
    # absolute before a game is made, which may change the working directory
    against, out = (path and Path(path).absolute() for path in (options.against, options.out))
    if options.out is not None and options.against is None:
        raise ConfigError("--out is the folder of a comparison; say with what to compare by --against DIR")
    if options.config is not None:
        from npu_vlrl.training.evaluate import evaluate

        config = load(options)
        if against is not None:
            _check_finished(against)
        folder = Path(config.run.dir).absolute()
        code = run_placed(config, "eval", evaluate)
    elif options.run_dir is None or options.against is None:
        raise ConfigError("eval needs --config FILE; or --run-dir DIR --against DIR, to compare finished evaluations")
    elif options.overrides:
        raise ConfigError(f"{options.overrides[0]} changes a configuration; give one with --config, or leave that out")
    else:
        code, folder = DONE, Path(options.run_dir)
    if code == DONE and against is not None:
        _compare(folder, against, out)
    return code


def _check_finished(folder: Path) -> None:
    """Raises ConfigError for an unusable other evaluation, before this one takes its time."""
    from npu_vlrl.report.evaluated import read

    read(folder)


def _compare(folder: Path, against: Path, out: Path | None) -> None:
    from rich.console import Console

    from npu_vlrl.network.world import is_engine
    from npu_vlrl.report import tables
    from npu_vlrl.report.comparison import compare

    if is_engine():
        return
    target = out if out is not None else folder / "against" / against.resolve().name
    try:
        values = compare(folder, against, target)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    Console(highlight=False, soft_wrap=True).print(*tables.comparison(values))
    print(f"changed tasks: {len(values['changed'])}; their trajectories are a run folder: {target.resolve()}")
