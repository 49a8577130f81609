"""Episodes of a game or an environment, which makes everything from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from npu_vlrl.config import Config
from npu_vlrl.types import Task


def generated(config: Config, seed: int, unit: int) -> Callable[[int], Task]:
    """Generator of episodes. There is no `demonstration`, since a game shows its own solutions."""
    game = config.environment.name.rpartition(":")[2]
    return lambda index: episode_task(game, seed, index)


def episode_task(game: str, seed: int, index: int) -> Task:
    """Task of one episode: the game makes everything else from `extra["seed"]`, 0 to 2**32 - 1."""
    name = f"{game}/{seed}/{index}"
    return Task(name, (), None, game, {"seed": random.Random(name).getrandbits(32)})
