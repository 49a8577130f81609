"""Registries: names of the configuration and of commands, with the module that implements each.

This module imports nothing of the project, so every room may import it. A task has its data, reward, demonstrations and
starting configuration in one place, `tasks/NAME.py` or `tasks/NAME/`, and an entry here: a new task touches these two
files. `tasks/__init__.py` lists the members that the modules of each table define.
"""

from __future__ import annotations

import importlib
from typing import Any

GENERATORS = {
    "photo": "npu_vlrl.tasks.photo",
    "arrow": "npu_vlrl.tasks.arrow",
    "episodes": "npu_vlrl.tasks.episodes",
}
"""Modules of `data.train.generator` and `data.eval.generator`."""

GAMES = {
    "sokoban": "npu_vlrl.tasks.sokoban",
    "frozenlake": "npu_vlrl.tasks.frozenlake",
    "gymnasium": "npu_vlrl.workflow.environments.gym",
}
"""Modules of `environment.name`, except `visual_qa`."""

RULES = {
    "math_verify": "npu_vlrl.workflow.rewards.math_verify",
    "geometry3k": "npu_vlrl.tasks.geo3k.reward",
    "tagged": "npu_vlrl.workflow.rewards.tagged",
    "rotation_broad": "npu_vlrl.tasks.rotation.broad",
    "rotation_strict": "npu_vlrl.tasks.rotation.strict",
    "benchmark": "npu_vlrl.tasks.benchmark.reward",
    "python": "npu_vlrl.workflow.rewards.python",
}
"""Modules of `reward.rule`, except `weighted`."""

DATA = {
    "geo3k": "npu_vlrl.tasks.geo3k.command",
    "rotation": "npu_vlrl.tasks.rotation.command",
    "benchmark": "npu_vlrl.tasks.benchmark.command",
}
"""Modules of `npu-vlrl data NAME`."""

STARTERS = {
    "geo3k": "npu_vlrl.tasks.geo3k",
    "rotation": "npu_vlrl.tasks.rotation",
    "sokoban": "npu_vlrl.tasks.sokoban",
    "own-data": "npu_vlrl.tasks.own_data",
}
"""Modules of `npu-vlrl init --task NAME`."""


def load(table: dict[str, str], name: str) -> Any:
    """Imports the module that a table registers for a name."""
    return importlib.import_module(table[name])
