"""Prints the shell completion of commands, options and configuration keys: `npu-vlrl completion`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

from npu_vlrl.commands.options import Commands
from npu_vlrl.config import sections

KEYS = {
    "bash": """
_npu_vlrl_keys() {
  compgen -W "%s" -- "$1"
}
""",
    "zsh": """
_npu_vlrl_keys() {
  local -a keys=(%s)
  compadd -S '' -a keys
}
""",
}
"""Shell functions that complete overrides: keys, each with the sign that its value follows."""

USES = {"bash": 'in .bashrc: eval "$(npu-vlrl completion bash)"', "zsh": "in a file _npu-vlrl of a folder in fpath"}

BASH_END = """
_npu_vlrl() {
  _shtab_npu_vlrl
  [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace
}
complete -o bashdefault -F _npu_vlrl npu-vlrl
"""
"""End of bash's script: the value of a key follows without a space."""

PATHS = {"FILE": "FILE", "DIR": "DIRECTORY", "RUN": "DIRECTORY"}
"""Kinds of paths in shtab, by the metavariable of an option."""


def add(commands: Commands) -> None:
    command = commands.add_parser("completion", help="print what a shell needs to complete words of this program")
    shells = command.add_subparsers(required=True, metavar="SHELL")
    for shell, use in USES.items():
        shells.add_parser(shell, help=use).set_defaults(run=_completion, shell=shell, light=True)


def _completion(options: argparse.Namespace) -> None:
    shtab = import_module("shtab")
    for action in _actions(options.parser):
        if action.dest == "overrides":
            action.complete = dict.fromkeys(KEYS, "_npu_vlrl_keys")  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str) and action.metavar in PATHS:
            action.complete = getattr(shtab, PATHS[action.metavar])  # type: ignore[attr-defined]
    keys = " ".join(f"{key}=" for key, _ in sections())
    preamble = {shell: text % keys for shell, text in KEYS.items()}
    print(
        shtab.complete(options.parser, options.shell, preamble=preamble) + (BASH_END if options.shell == "bash" else "")
    )


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Arguments of all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
