"""`npu-vlrl COMMAND …`: parses the command line, calls one function, and maps errors to exit codes.

Exit codes: 0 done, 1 the run failed, 2 bad input or missing hardware (one message that says what to change), 130 it was
ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from npu_vlrl import __version__
from npu_vlrl.commands import completion, data, doctor, estimate, evaluate, export, init, play, plot, train, view
from npu_vlrl.common.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED
from npu_vlrl.config import ConfigError

COMMANDS = (init, estimate, train, evaluate, view, plot, export, play, doctor, data, completion)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    options = _parse(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:  # also in what is imported, which takes seconds
        print("npu-vlrl: ended by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    try:
        if not options.light:
            _check_software()  # what the command imports needs it
        return options.run(options) or DONE
    except ConfigError as error:
        return _ends(BAD_INPUT, str(error))
    except Exception as error:
        return _explained(error)


def _check_software() -> None:
    """Raises ConfigError for a version of transformers that the project was not tested with."""
    from npu_vlrl.hardware.software import unsupported

    if problem := unsupported():
        raise ConfigError(problem)


def _explained(error: Exception) -> int:
    """Prints an expected error for the user and returns its exit code; re-raises any other error."""
    from safetensors import SafetensorError

    from npu_vlrl.common.atomic_files import is_full, refusal
    from npu_vlrl.config.extras import EXTRAS, remedy
    from npu_vlrl.engines.base import EngineError
    from npu_vlrl.hardware import HardwareError
    from npu_vlrl.learner.checkpoint import CheckpointError
    from npu_vlrl.learner.trainer import LearnerError
    from npu_vlrl.network.interrupt import Interrupted
    from npu_vlrl.network.world import PeerError, leave, started_processes
    from npu_vlrl.rollout.judgements import RolloutError
    from npu_vlrl.sync.weights import SyncError
    from npu_vlrl.types import DataError

    failure = str(error)
    if isinstance(error, DataError | HardwareError | CheckpointError):
        return _ends(BAD_INPUT, failure)
    if isinstance(error, ModuleNotFoundError) and (package := str(error.name).partition(".")[0]) in EXTRAS:
        return _ends(BAD_INPUT, f"{package} is not installed: {remedy(package)}")
    if isinstance(error, Interrupted):
        with suppress(OSError):  # the terminal may be what asked for it by closing
            return _ends(INTERRUPTED, failure)
        return INTERRUPTED
    if isinstance(error, OSError | SafetensorError):
        if problem := refusal(error):
            return _ends(BAD_INPUT, problem)
        if not is_full(error):
            raise error
        failure += ": free some space, and go on with run.if_exists=resume if it was a training"
    elif not isinstance(error, EngineError | LearnerError | PeerError | RolloutError | SyncError):
        raise error
    _ends(FAILED, f"the run failed: {failure}")
    return FAILED if started_processes() == 1 else leave(FAILED)


def _ends(code: int, message: str) -> int:
    from npu_vlrl.report.console import printable

    print(f"npu-vlrl: {printable(message)}", file=sys.stderr)
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. Overrides may stand anywhere, also between options, which argparse alone refuses."""
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
    # completion describes the parser; a light command reads no model, and imports neither torch nor transformers
    parser.set_defaults(parser=parser, light=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
