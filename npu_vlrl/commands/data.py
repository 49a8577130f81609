"""Commands `npu-vlrl data …`, which prepare and check data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial

from npu_vlrl.commands.options import Commands, add_config, load
from npu_vlrl.common.exit_codes import BAD_INPUT, DONE
from npu_vlrl.common.registry import DATA
from npu_vlrl.common.registry import load as load_module
from npu_vlrl.config import ConfigError


def add(commands: Commands) -> None:
    data = commands.add_parser("data", help="prepare data, or check it")
    kinds = data.add_subparsers(required=True, metavar="KIND")
    check = kinds.add_parser("check", help="read all tasks of a configuration, and say which a training cannot use")
    add_config(check)
    check.add_argument("--limit", type=int, metavar="N", help="look at the first N usable rows of each source only")
    check.set_defaults(run=_check)
    for name in DATA:
        made = load_module(DATA, name)
        parser = kinds.add_parser(name, help=made.HELP)
        made.add(parser)
        parser.set_defaults(run=partial(_make, made.run))


def _check(options: argparse.Namespace) -> int:
    from npu_vlrl.preview.check_data import check
    from npu_vlrl.report.console import printable

    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {options.limit}")
    config, sources = load(options), []
    for found in check(config, options.limit):
        sources.append(found)
        for line in found.lines(config.workflow.context_tokens):
            print(printable(line), flush=True)
    for found in sources:
        for line in found.ignored():
            print(printable(f"{found.name}: {line}"), flush=True)
    return DONE if all(found.good_enough for found in sources) else BAD_INPUT


def _make(lines: Callable[[argparse.Namespace], Iterable[str]], options: argparse.Namespace) -> None:
    from npu_vlrl.report.console import printable

    try:
        for line in lines(options):
            print(printable(line))
    except OSError as error:
        raise ConfigError(f"--out: {error}; choose another folder") from error
