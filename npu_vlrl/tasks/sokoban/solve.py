"""Finds a shortest solution of a level, counted in moves."""

from __future__ import annotations

import heapq
import itertools
from functools import lru_cache

from npu_vlrl.tasks.sokoban.rules import ACTIONS, Room, State

LIMIT = 200_000
"""Number of states that are examined before the search gives up, some seconds."""

_Node = tuple[int, frozenset[int]]
"""Position of the player, and of the boxes."""


def solve(state: State, limit: int = LIMIT) -> list[str] | None:
    """Finds a shortest list of actions that solves the level; None when none exists, or is found within `limit`.

    A* (Hart, Nilsson, Raphael 1968) over player and boxes. Its bound is the number of pushes that the boxes need, each
    alone in the room and to the target nearest to it. Pushes of a box to a dead cell, from which it reaches no target,
    are pruned.
    """
    room, pushes = state.room, push_distances(state.room)
    if not state.boxes <= pushes.keys():
        return None
    start: _Node = (state.player, state.boxes)
    best: dict[_Node, tuple[int, _Node, str]] = {start: (0, start, "")}  # moves, the node before, the action from it
    bound = sum(pushes[box] for box in state.boxes)
    order = itertools.count()
    queue = [(bound, bound, next(order), start)]
    for _ in range(limit):
        if not queue:
            break
        total, bound, _, node = heapq.heappop(queue)
        if node[1] == room.targets:
            return _actions(best, node)
        moves = total - bound + 1
        for action in ACTIONS:
            after = room.moved(*node, action)
            after_bound = bound
            if after[1] is not node[1]:
                (left,), (entered,) = node[1] - after[1], after[1] - node[1]
                if entered not in pushes:
                    continue
                after_bound += pushes[entered] - pushes[left]
            if after not in best or moves < best[after][0]:
                best[after] = (moves, node, action)
                heapq.heappush(queue, (moves + after_bound, after_bound, next(order), after))
    return None


def _actions(best: dict[_Node, tuple[int, _Node, str]], node: _Node) -> list[str]:
    actions: list[str] = []
    while best[node][0]:
        _, node, action = best[node]
        actions.append(action)
    return actions[::-1]


@lru_cache(maxsize=64)
def push_distances(room: Room) -> dict[int, int]:
    """Minimum number of pushes that bring a box alone in the room from a cell to a target; dead cells are left out.

    The player is assumed to reach every cell, so the number is a lower bound in a room with more boxes.
    """
    distances = dict.fromkeys(room.targets, 0)
    waiting = list(room.targets)
    for cell in waiting:
        for step in room.steps.values():
            # pulled by `step`, the box comes to lie one step on, and the player one further
            if cell + step in room.floor and cell + 2 * step in room.floor and cell + step not in distances:
                distances[cell + step] = distances[cell] + 1
                waiting.append(cell + step)
    return distances
