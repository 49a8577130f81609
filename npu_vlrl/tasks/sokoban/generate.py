"""Makes solvable rooms from a seed: dug by a random walk, and played backwards from the solved room.

The idea is that of gym-sokoban (Schrader 2018), after Weber et al. (2017, arXiv 1707.06203): a push undoes a pull.
"""

from __future__ import annotations

import random
from functools import lru_cache

from npu_vlrl.tasks.sokoban.rules import Room, State
from npu_vlrl.tasks.sokoban.solve import solve
from npu_vlrl.types import DataError

ATTEMPTS = 1000
"""Maximum number of rooms that are tried for one seed."""
PULLS = 10
"""Average number of pulls of a box."""


@lru_cache(maxsize=1024)
def generate(seed: int, size: int, boxes: int, min_solution: int, max_solution: int | None) -> State:
    """Makes a room of `size` x `size` cells with its outer wall, and no box on a target. Equal arguments give equal
    rooms.

    The shortest solution has from `min_solution` to `max_solution` actions; None is no limit. A room that `solve`
    cannot solve is not taken, unless there is no limit. Raises DataError when `ATTEMPTS` rooms are not enough.
    """
    rng = random.Random(f"sokoban/{size}/{boxes}/{seed}")
    for _ in range(ATTEMPTS):
        state = _played_back(_dug(size, boxes, rng), rng)
        if not state.on_target and _has_length(state, min_solution, max_solution):
            return state
    most = "any number of" if max_solution is None else f"at most {max_solution}"
    raise DataError(
        f"no sokoban room of size {size} with {boxes} boxes, solved in at least {min_solution} and {most} actions, in "
        f"{ATTEMPTS} attempts with seed {seed}: choose a larger size, fewer boxes or wider limits"
    )


def _dug(size: int, boxes: int, rng: random.Random) -> Room:
    """Digs out half of the inside or more, in one piece; the targets are any cells of it."""
    inside = {row * size + column for row in range(1, size - 1) for column in range(1, size - 1)}
    wanted = rng.randint(max(len(inside) // 2, boxes + 2), len(inside))
    cell = rng.choice(sorted(inside))
    floor = {cell}
    while len(floor) < wanted:
        ahead = cell + rng.choice((-size, size, -1, 1))
        if ahead in inside:
            cell = ahead
            floor.add(cell)
    return Room(size, size, frozenset(floor), frozenset(rng.sample(sorted(floor), boxes)))


def _played_back(room: Room, rng: random.Random) -> State:
    """Plays random pulls from the solved room; the result may have no box that can be pulled."""
    boxes = room.targets
    player = rng.choice(sorted(room.floor - boxes))
    for _ in range(PULLS * len(boxes)):
        reach = room.reach(player, boxes)
        pulls = [
            (box, step)
            for box in sorted(boxes)
            for step in room.steps.values()
            if box + step in reach and box + 2 * step in reach
        ]
        if not pulls:
            break
        box, step = rng.choice(pulls)
        player, boxes = box + 2 * step, boxes - {box} | {box + step}
    return State(room, rng.choice(sorted(room.reach(player, boxes))), boxes)


def _has_length(state: State, least: int, most: int | None) -> bool:
    if least <= 1 and most is None:
        return True
    solution = solve(state)
    return solution is not None and least <= len(solution) and (most is None or len(solution) <= most)
