"""Sokoban: push every box on a target, in rooms made from a seed or in levels of a file."""

from __future__ import annotations

from collections.abc import Callable

from npu_vlrl.tasks.sokoban.draw import draw
from npu_vlrl.tasks.sokoban.generate import generate
from npu_vlrl.tasks.sokoban.levels import level_text, read_levels
from npu_vlrl.tasks.sokoban.rules import ACTIONS, State
from npu_vlrl.tasks.sokoban.solve import solve
from npu_vlrl.tasks.starting import TRAINING, Values
from npu_vlrl.types import Image
from npu_vlrl.workflow.environments.game import Move

PREPARE = None

STARTER: Values = {
    "run.dir": "runs/sokoban",
    "data.train.generator": "episodes",
    **TRAINING,
    "environment.name": "sokoban",
    "environment.options": {"size": 6, "boxes": 1, "tile": 32},
    "environment.format": "free_think",
    "environment.format_reward": 0.1,
    "workflow.max_turns": 6,
    "workflow.reward_mode": "sum",
    "workflow.turn_tokens": 256,
    "workflow.context_tokens": 3072,
    "evaluation.tasks": 128,
    "model.min_pixels": 3136,
    "model.max_pixels": 50176,
    "algorithm.preset": "gigpo",
}

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0

SMALLEST, SMALLEST_TILE = 5, 4
"""Limits of `size` and `tile`: in 4x4 cells every box stands in a corner, and smaller sprites are indistinguishable."""

RULES = """\
You play Sokoban: push every box on a target. The picture shows the room from above. Red bricks are walls, black is \
floor, the green figure is you, a yellow crate is a box, and a red square outline is a target. A box on a target has a \
red frame.
Up, Down, Left and Right move you by one cell. If a box is there, you push it one cell further, which works only if \
that cell holds neither wall nor box. You cannot pull, and you cannot push two boxes at once.
Every action costs 0.1. Pushing a box on a target earns 1, pushing it off costs 1, and the last box earns 10 more."""


class Sokoban:
    """Game Sokoban, see `environments.game.Game`. Terms `step`, `box` and `solved` as in gym-sokoban and VAGEN."""

    actions = ACTIONS
    rules = RULES

    def __init__(self, level: Callable[[int], State], tile: int) -> None:
        """`level`: seed -> the state to start in; `tile`: side of a cell in the image, in pixels."""
        self._level = level
        self._tile = tile

    def start(self, seed: int) -> None:
        """Starts a room. Raises DataError when the seed has none."""
        self.state = self._level(seed)

    def act(self, action: str) -> Move:
        before, self.state = self.state, self.state.moved(action)
        assert not before.solved, "the game is over"
        solved = self.state.solved
        terms = {
            "step": STEP_REWARD,
            "box": BOX_REWARD * (self.state.on_target - before.on_target),
            "solved": SOLVED_REWARD if solved else 0.0,
        }
        return Move(terms, solved, over=solved)

    def picture(self) -> Image:
        return draw(self.state, self._tile)

    def state_key(self) -> str:
        """The level as text: walls, targets, boxes and player."""
        return level_text(self.state)

    def solution(self) -> list[str] | None:
        """A shortest solution; None also for a level that is too hard for `solve`."""
        return solve(self.state)


def game(
    *,
    size: int | None = None,
    boxes: int | None = None,
    min_solution: int | None = None,
    max_solution: int | None = None,
    levels: str | None = None,
    tile: int = 28,
) -> Sokoban:
    """Makes rooms from the seed, or plays levels of a file: level number seed modulo their count.

    Args:
        size: Side of a made room in cells, with its wall; 6 if not given.
        boxes: Number of boxes in a made room; 1 if not given.
        min_solution: The shortest solution of a made room has at least as many actions.
        max_solution: The shortest solution of a made room has at most as many actions.
        levels: A file of levels instead, `hard_003` or `unfiltered_test_000` of Boxoban, or a path.
        tile: Side of a cell in the image, in pixels. 28 is one token of Qwen2.5-VL, 32 of Qwen3-VL.

    Raises ValueError for options that do not fit, and DataError for levels that cannot be read or rooms not found.
    """
    if tile < SMALLEST_TILE:
        raise ValueError(f"sokoban: tile is {tile}; it must be at least {SMALLEST_TILE} pixels")
    made = {"size": size, "boxes": boxes, "min_solution": min_solution, "max_solution": max_solution}
    given = {name: value for name, value in made.items() if value is not None}
    if levels is None:
        return Sokoban(_rooms(**given), tile)
    if given:
        raise ValueError(f"sokoban: levels and {', '.join(given)} exclude each other; leave one out")
    states = read_levels(levels)
    return Sokoban(lambda seed: states[seed % len(states)], tile)


def _rooms(
    size: int = 6, boxes: int = 1, min_solution: int = 1, max_solution: int | None = None
) -> Callable[[int], State]:
    """Function seed -> room. Raises DataError when seed 0 has no room, so that impossible limits show at once."""
    if size < SMALLEST:
        raise ValueError(f"sokoban: size is {size}; it must be at least {SMALLEST} cells, the wall included")
    if not 1 <= boxes <= (size - 2) ** 2 - 2:
        raise ValueError(f"sokoban: boxes is {boxes}; a room of size {size} holds from 1 to {(size - 2) ** 2 - 2}")
    if max_solution is not None and max_solution < min_solution:
        raise ValueError(f"sokoban: max_solution {max_solution} is below min_solution {min_solution}")
    generate(0, size, boxes, min_solution, max_solution)
    return lambda seed: generate(seed, size, boxes, min_solution, max_solution)
