"""Is the hidden image light or dark?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np

from npu_vlrl.config import Config
from npu_vlrl.types import Image, Message, Task
from npu_vlrl.workflow.tools.forms import ToolForm


def generated(config: Config, seed: int, unit: int) -> Callable[[int], Task]:
    def task(index: int) -> Task:
        light = random.Random(f"shade/{seed}/{index}").random() < 0.5
        image = Image(np.full((2 * unit, 2 * unit, 3), 220 if light else 30, np.uint8))
        message = Message("user", (image, "Is it light or dark?"))
        return Task(f"shade/{seed}/{index}", (message,), "light" if light else "dark", "shade")

    return task


def demonstration(task: Task, config: Config, rng: random.Random, opened: bool, form: ToolForm) -> Iterable[str]:
    assert task.answer is not None
    yield f"<answer>{task.answer}</answer>"
