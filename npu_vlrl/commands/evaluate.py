"""`npu-vlrl eval`"""

from __future__ import annotations

import argparse

from npu_vlrl.commands.options import Commands, add_configured, load, run_placed


def add(commands: Commands) -> None:
    add_configured(commands, "eval", "play the evaluation tasks without learning", _eval)


def _eval(options: argparse.Namespace) -> int:
    from npu_vlrl.run import evaluate_only

    return run_placed(load(options), "eval", evaluate_only)
