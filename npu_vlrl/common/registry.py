"""Names of the configuration and of commands, with the module that each stands for.

It imports nothing of the project, so every room may read it. A task has its data, reward, demonstrations and starting
configuration in one place, `tasks/NAME.py` or `tasks/NAME/`, and is entered here: those are the two files of a new one.
`tasks/__init__.py` says what the modules of each table hold.
"""

from __future__ import annotations

import importlib
from typing import Any

GENERATORS = {
    "photo": "npu_vlrl.tasks.photo",
    "arrow": "npu_vlrl.tasks.arrow",
    "shade": "npu_vlrl.tasks.shade",
    "episodes": "npu_vlrl.tasks.episodes",
}
"""`data.train.generator`, `data.eval.generator`"""

GAMES = {
    "sokoban": "npu_vlrl.tasks.sokoban",
    "frozenlake": "npu_vlrl.tasks.frozenlake",
    "lamps": "npu_vlrl.tasks.lamps",
    "gymnasium": "npu_vlrl.workflow.environments.gym",
}
"""`environment.name`, besides `visual_qa`"""

RULES = {
    "math_verify": "npu_vlrl.workflow.rewards.math_verify",
    "geometry3k": "npu_vlrl.tasks.geo3k.reward",
    "tagged": "npu_vlrl.workflow.rewards.tagged",
    "letters": "npu_vlrl.workflow.rewards.letters",
    "rotation_broad": "npu_vlrl.tasks.rotation.broad",
    "rotation_strict": "npu_vlrl.tasks.rotation.strict",
    "benchmark": "npu_vlrl.tasks.benchmark.reward",
    "python": "npu_vlrl.workflow.rewards.python",
}
"""`reward.rule`, besides `weighted`"""

DATA = {
    "geo3k": "npu_vlrl.tasks.geo3k.command",
    "rotation": "npu_vlrl.tasks.rotation.command",
    "benchmark": "npu_vlrl.tasks.benchmark.command",
}
"""`npu-vlrl data NAME`"""

STARTERS = {
    "geo3k": "npu_vlrl.tasks.geo3k",
    "rotation": "npu_vlrl.tasks.rotation",
    "sokoban": "npu_vlrl.tasks.sokoban",
    "own-data": "npu_vlrl.tasks.own_data",
}
"""`npu-vlrl init --task NAME`"""


def load(table: dict[str, str], name: str) -> Any:
    """The module of a name that the table has."""
    return importlib.import_module(table[name])
