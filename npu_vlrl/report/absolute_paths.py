"""Makes the paths of a configuration absolute: a game runs in this process, and may change the working directory."""

from __future__ import annotations

import os.path
from typing import Any

from npu_vlrl.config import Config
from npu_vlrl.workflow.workers import is_spec


def rooted(config: Config) -> Config:
    """Configuration with relative paths resolved against the current working directory.

    Paths are `run.dir`, `model.path`, paths of data, and functions of the user's files; other texts in options stay.
    """
    data, model = config.data, config.model
    tiny = model.path.startswith("tiny:")
    sources = {
        name: source.model_copy(update={"path": os.path.abspath(source.path)})
        for name, source in (("train", data.train), ("eval", data.eval))
        if source is not None and source.path is not None
    }
    sections = {
        "run": config.run.model_copy(update={"dir": os.path.abspath(config.run.dir)}),
        "model": model if tiny else model.model_copy(update={"path": os.path.abspath(model.path)}),
        "data": data.model_copy(update=sources),
        "workflow": config.workflow.model_copy(
            update={"name": _rooted(config.workflow.name), "tools": _rooted(config.workflow.tools)}
        ),
        "environment": config.environment.model_copy(update={"name": _rooted(config.environment.name)}),
        "algorithm": config.algorithm.model_copy(
            update={key: _rooted(getattr(config.algorithm, key)) for key in ("advantage", "loss", "group_reward")}
        ),
        "reward": config.reward.model_copy(
            update={"rule": _rooted(config.reward.rule), "options": _rooted(config.reward.options)}
        ),
    }
    return config.model_copy(update=sections)


def _rooted(value: Any) -> Any:
    """Resolves specs of functions, wherever they are in a value."""
    if isinstance(value, dict):
        return {key: _rooted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_rooted, value))
    return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) and is_spec(value) else value
