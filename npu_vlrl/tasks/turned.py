"""Tasks with images turned by quarter turns: the policy sees a card, looks at the covered image, and names its top.

The `look` tool shows `extra["hidden_image"]`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from npu_vlrl.config import Config
from npu_vlrl.types import Image, Message, Task
from npu_vlrl.workflow.thought import LEFT_OPEN
from npu_vlrl.workflow.tools.forms import HERMES, ToolForm

DIRECTIONS = ("up", "right", "down", "left")
"""Possible answers; the index is the number of quarter turns clockwise from up."""

_CARD_COLOUR = (120, 120, 120)


def demonstration(task: Task, config: Config, rng: random.Random, opened: bool, form: ToolForm) -> Iterable[str]:
    """Demonstrates a look, then answers until the turns are used up; see `script`."""
    return script(task, config.warm_start.right_share, rng, config.workflow.max_turns - 1, opened, form)


def script(
    task: Task, right_share: float, rng: random.Random, tries: int, opened: bool = False, form: ToolForm = HERMES
) -> list[str]:
    """Lines of a demonstrator: a look, then answers, of which `right_share` are right.

    The others are drawn evenly from the wrong ones, and no answer is given twice. `opened`: the chat template opens a
    thought, which is ended first. `form`: how calls of tools are written.
    """
    left = list(DIRECTIONS)
    lines = [form.write("look", {})]
    for _ in range(tries):
        wrong = [choice for choice in left if choice != task.answer]
        right = task.answer in left and (rng.random() < right_share or not wrong)
        answer = task.answer if right else rng.choice(wrong)
        assert answer is not None
        left.remove(answer)
        lines.append(f"<answer>{answer}</answer>")
    return [LEFT_OPEN + line for line in lines] if opened else lines


def turned(rgb: np.ndarray, turns: int) -> Image:
    """Turns clockwise by quarter turns, exactly."""
    return Image(np.ascontiguousarray(np.rot90(rgb, -turns)))


def hidden_task(kind: str, seed: int, index: int, question: str, hidden: Image, turns: int, card: int) -> Task:
    """Makes a task with a hidden image. `size` and `card` are the sides in pixels of it and of the card on it."""
    cover = Image(np.full((card, card, 3), _CARD_COLOUR, np.uint8))
    message = Message("user", (cover, question))
    return Task(f"{kind}/{seed}/{index}", (message,), DIRECTIONS[turns], kind, {"hidden_image": hidden})
