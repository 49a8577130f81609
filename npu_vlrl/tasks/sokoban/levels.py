"""Levels as text: `#` wall, space floor, `.` target, `$` box, `*` box on target, `@` player, `+` player on target.

A file has several, as Boxoban writes them: a line `; name` before each; empty lines do not count.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from npu_vlrl.tasks.sokoban.rules import Room, State
from npu_vlrl.types import DataError

SHIPPED = ("hard_003", "unfiltered_test_000")
"""Files of Boxoban in the package: 332 and 1000 levels of 10x10 cells with 4 boxes."""

_CHARACTERS = "# .$*@+"


@cache
def read_levels(source: str) -> tuple[State, ...]:
    """Reads the levels of a file, in its order; `source` is one of `SHIPPED` or a path.

    Raises DataError for a missing or empty file, and for a level that cannot be played, with file and level.
    """
    if source in SHIPPED:
        text = (importlib.resources.files(__package__) / "assets" / "levels" / f"{source}.txt").read_text("utf-8")
    elif Path(source).is_file():
        text = Path(source).read_text("utf-8", errors="replace")
    else:
        raise DataError(f"no levels at {source!r}: give a text file, or one of {', '.join(SHIPPED)}")
    levels: list[tuple[str, list[str]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(";"):
            levels.append((line[1:].strip(), []))
        elif line.strip():
            if not levels:
                raise DataError(f"{source}, line {number}: a level starts with a line '; name', not with {line!r}")
            levels[-1][1].append(line)
    if not levels:
        raise DataError(f"{source} has no level; each starts with a line '; name'")
    return tuple(parse_level(rows, f"{source}, level {name}") for name, rows in levels)


def parse_level(rows: Sequence[str], name: str = "level") -> State:
    """Reads one level. Short rows are filled up; cells that the player cannot reach, disregarding boxes, become wall.

    Raises DataError, beginning with `name`, for a level that cannot be played.
    """
    width, height = max(map(len, rows), default=0), len(rows)
    found: dict[str, list[int]] = {character: [] for character in _CHARACTERS}
    for row, line in enumerate(rows):
        for column, character in enumerate(line.ljust(width)):
            if character not in found:
                where = f"row {row + 1}, column {column + 1}"
                raise DataError(f"{name}: unknown {character!r} in {where}; a level is made of '{_CHARACTERS}'")
            found[character].append(row * width + column)
    players, boxes = found["@"] + found["+"], frozenset(found["$"] + found["*"])
    targets = frozenset(found["."] + found["*"] + found["+"])
    if len(players) != 1:
        raise DataError(f"{name} has {len(players)} players (@ or +); it needs one")
    if not boxes or len(boxes) != len(targets):
        counts = f"{len(boxes)} boxes ($ or *) and {len(targets)} targets (. * or +)"
        raise DataError(f"{name} has {counts}; it needs as many boxes as targets, at least one")
    free = frozenset(range(width * height)) - frozenset(found["#"])
    floor = frozenset(Room(width, height, free, targets).reach(players[0]))
    _check_closed(floor, width, height, name)
    for cell in sorted((boxes | targets) - floor):
        where = f"row {cell // width + 1}, column {cell % width + 1}"
        raise DataError(f"{name}: the box or target in {where} is behind walls; the player must be able to get there")
    if boxes == targets:
        raise DataError(f"{name} is solved from the start: move a box")
    return State(Room(width, height, floor, targets), players[0], boxes)


def _check_closed(floor: frozenset[int], width: int, height: int, name: str) -> None:
    for cell in sorted(floor):
        row, column = divmod(cell, width)
        if row in (0, height - 1) or column in (0, width - 1):
            where = f"row {row + 1}, column {column + 1}"
            raise DataError(f"{name} is open at {where}: close it with walls (#) around all that the player can reach")


def level_text(state: State) -> str:
    """A level as `parse_level` reads it, in lines of equal length."""
    room = state.room
    rows = (
        "".join(_character(state, row * room.width + column) for column in range(room.width))
        for row in range(room.height)
    )
    return "\n".join(rows)


def _character(state: State, cell: int) -> str:
    target = cell in state.room.targets
    if cell not in state.room.floor:
        return "#"
    if cell == state.player:
        return "+" if target else "@"
    if cell in state.boxes:
        return "*" if target else "$"
    return "." if target else " "
