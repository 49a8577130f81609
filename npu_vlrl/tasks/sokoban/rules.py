"""Rules of Sokoban: positions of player and boxes, and the effect of a move.

Cells are numbers, row by row from the upper left corner: row * width + column.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

ACTIONS = ("Up", "Down", "Left", "Right")


@dataclass(frozen=True)
class Room:
    """Fixed part of a level. Every cell that is not floor is wall, and the border of the grid is no floor.

    Example: `Room(width=5, height=3, floor=frozenset({6, 7, 8}), targets=frozenset({8}))`
    """

    width: int
    height: int
    floor: frozenset[int]
    """Cells that the player and the boxes can be on; targets are floor."""
    targets: frozenset[int]

    @cached_property
    def steps(self) -> dict[str, int]:
        """Offset that each action adds to the number of a cell."""
        return {"Up": -self.width, "Down": self.width, "Left": -1, "Right": 1}

    def moved(self, player: int, boxes: frozenset[int], action: str) -> tuple[int, frozenset[int]]:
        """Computes player and boxes after an action.

        The player walks, or pushes the one box ahead of it; a wall ahead, or a wall or another box behind that box,
        leaves all as it is.
        """
        step = self.steps[action]
        ahead, beyond = player + step, player + 2 * step
        if ahead not in self.floor:
            return player, boxes
        if ahead not in boxes:
            return ahead, boxes
        if beyond not in self.floor or beyond in boxes:
            return player, boxes
        return ahead, boxes - {ahead} | {beyond}

    def reach(self, player: int, boxes: Set[int] = frozenset()) -> set[int]:
        """Cells that the player can walk to without a push."""
        reached, waiting = {player}, [player]
        while waiting:
            cell = waiting.pop()
            for step in self.steps.values():
                ahead = cell + step
                if ahead in self.floor and ahead not in boxes and ahead not in reached:
                    reached.add(ahead)
                    waiting.append(ahead)
        return reached


@dataclass(frozen=True)
class State:
    """A room with its player and boxes; there are as many boxes as targets."""

    room: Room
    player: int
    boxes: frozenset[int]

    @property
    def on_target(self) -> int:
        """Number of boxes on targets."""
        return len(self.boxes & self.room.targets)

    @property
    def solved(self) -> bool:
        return self.boxes == self.room.targets

    def moved(self, action: str) -> State:
        """Computes the state after one of `ACTIONS`; see `Room.moved`."""
        return State(self.room, *self.room.moved(self.player, self.boxes, action))
