"""Reinforcement learning of vision-language models over several turns, on Ascend NPUs, CUDA GPUs and CPUs.

This module is the public interface (docs/api.md). Each name is imported when it is first used, so that `import
npu_vlrl` costs nothing.

Example: `npu_vlrl.train(npu_vlrl.load_config("photo_tiny", {"train.steps": 10}))["final"]["accuracy"]`
"""

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# torch would load torch_npu by itself wherever it is installed, and `import torch` would fail on a host without CANN.
# `hardware/` loads it when it is wanted. A script that imports torch before npu_vlrl must set this itself.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

_ORIGINS = {
    "npu_vlrl.algorithms": (
        *("ESTIMATORS", "LOSSES", "AdvantageBatch", "Group", "LossTokens", "Options"),
        *("estimator", "group_reward", "loss"),
    ),
    "npu_vlrl.config": ("Config", "ConfigError", "dump_config", "load_config"),
    "npu_vlrl.train_loop": ("train",),
    "npu_vlrl.training.evaluate": ("evaluate",),
    "npu_vlrl.types": (
        *("DataError", "Environment", "Image", "Judge", "Message", "Step"),
        *("Task", "ToolCall", "ToolResult", "Trajectory", "Turn", "Verdict"),
    ),
    "npu_vlrl.workflow.environments.game": ("Game", "Move"),
    "npu_vlrl.workflow.tools": ("Tool", "ToolContext", "ToolError"),
}
"""Module of each public name. The imports below say the same to type checkers; a test compares the two."""

if TYPE_CHECKING:
    from npu_vlrl.algorithms import ESTIMATORS as ESTIMATORS
    from npu_vlrl.algorithms import LOSSES as LOSSES
    from npu_vlrl.algorithms import AdvantageBatch as AdvantageBatch
    from npu_vlrl.algorithms import Group as Group
    from npu_vlrl.algorithms import LossTokens as LossTokens
    from npu_vlrl.algorithms import Options as Options
    from npu_vlrl.algorithms import estimator as estimator
    from npu_vlrl.algorithms import group_reward as group_reward
    from npu_vlrl.algorithms import loss as loss
    from npu_vlrl.config import Config as Config
    from npu_vlrl.config import ConfigError as ConfigError
    from npu_vlrl.config import dump_config as dump_config
    from npu_vlrl.config import load_config as load_config
    from npu_vlrl.train_loop import train as train
    from npu_vlrl.training.evaluate import evaluate as evaluate
    from npu_vlrl.types import DataError as DataError
    from npu_vlrl.types import Environment as Environment
    from npu_vlrl.types import Image as Image
    from npu_vlrl.types import Judge as Judge
    from npu_vlrl.types import Message as Message
    from npu_vlrl.types import Step as Step
    from npu_vlrl.types import Task as Task
    from npu_vlrl.types import ToolCall as ToolCall
    from npu_vlrl.types import ToolResult as ToolResult
    from npu_vlrl.types import Trajectory as Trajectory
    from npu_vlrl.types import Turn as Turn
    from npu_vlrl.types import Verdict as Verdict
    from npu_vlrl.workflow.environments.game import Game as Game
    from npu_vlrl.workflow.environments.game import Move as Move
    from npu_vlrl.workflow.tools import Tool as Tool
    from npu_vlrl.workflow.tools import ToolContext as ToolContext
    from npu_vlrl.workflow.tools import ToolError as ToolError

__all__ = [name for names in _ORIGINS.values() for name in names]


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _ORIGINS.items():
        if name in names:
            value: object = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
