"""FrozenLake: cross the ice to the flag and fall into no hole. The rules are those of gymnasium's FrozenLake-v1."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np
import PIL.Image
import PIL.ImageDraw
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from npu_vlrl.types import DataError, Image
from npu_vlrl.workflow.environments.game import Move

Lake = tuple[str, ...]
"""Rows of cells, written as gymnasium does: S start, F frozen, H hole, G goal."""

ATTEMPTS = 1000
"""Maximum number of lakes that are tried for one seed."""
SMALLEST_TILE = 8
"""Smallest side of a tile in pixels; smaller figures are indistinguishable."""

RULES = """\
You cross a frozen lake. The picture shows it from above: light squares are ice, dark discs are holes, the green flag \
is the goal, the red figure is you.
Left, Down, Right and Up move you by one square; at the edge you stay where you are.{slippery} A hole ends the game.
An action earns {step:g}, reaching the flag {goal:g} more, and falling into a hole {hole:g} more."""
SLIPPERY = " The ice is slippery: one time in three you move as you want, else to the left or right of that way."


class FrozenLake:
    """Game FrozenLake, see `environments.game.Game`. Terms of a move: `step`, `goal` and `hole`."""

    actions = ("Left", "Down", "Right", "Up")
    """Names of the actions, in gymnasium's order."""

    def __init__(
        self, lake: Callable[[int], Lake], slippery: bool, rewards: tuple[float, float, float], tile: int
    ) -> None:
        """`lake`: seed -> lake; `rewards`: of a step, the goal and a hole; `tile`: side of a square in pixels."""
        self.rules = RULES.format(
            slippery=SLIPPERY if slippery else "", step=rewards[0], goal=rewards[1], hole=rewards[2]
        )
        self._make, self._slippery, self._rewards, self._tile = lake, slippery, rewards, tile

    def start(self, seed: int) -> None:
        """Starts a lake. The seed also determines how the player slips. Raises DataError when it has no lake."""
        self.lake = self._make(seed)
        self._env = FrozenLakeEnv(desc=list(self.lake), is_slippery=self._slippery)
        self._env.reset(seed=seed)

    def act(self, action: str) -> Move:
        assert self._here in "SF", "the game is over"
        self._env.step(self.actions.index(action))  # type: ignore[no-untyped-call]
        step, goal, hole = self._rewards
        solved, lost = self._here == "G", self._here == "H"
        terms = {"step": step, "goal": goal if solved else 0.0, "hole": hole if lost else 0.0}
        return Move(terms, solved, over=solved or lost)

    def picture(self) -> Image:
        tiles = _tiles(self._tile)
        rows = [np.concatenate([tiles[cell] for cell in row], 1) for row in self.state_key().split("\n")]
        return Image(np.concatenate(rows, 0))

    def state_key(self) -> str:
        """The lake as text: `.` ice, `O` hole, `G` goal, and the player: `P` on ice, `X` in a hole, `*` at the goal.

        The coming slips are no part of it: they are chance to the policy.
        """
        text = "\n".join(self.lake).translate(_SHOWN)
        at = self._env.s + self._env.s // len(self.lake[0])  # one more for each end of a line
        return text[:at] + _PLAYER[text[at]] + text[at + 1 :]

    def solution(self) -> list[str] | None:
        """A shortest way to the goal; None on slippery ice, where no list of actions surely reaches it."""
        return None if self._slippery else shortest_way(self.lake, self._env.s)

    @property
    def _here(self) -> str:
        return "".join(self.lake)[self._env.s]


_SHOWN = str.maketrans("SFH", "..O")
_PLAYER = {".": "P", "O": "X", "G": "*"}


def shortest_way(lake: Lake, start: int) -> list[str] | None:
    """Finds a shortest way breadth first from cell `start` (counted row by row) over ice to a goal; None without a way.

    Among ways of the same length it takes the first in the order of `FrozenLake.actions`.
    """
    cells, width = "".join(lake), len(lake[0])
    ways: dict[int, list[str]] = {start: []}
    waiting = [start]
    for cell in waiting:
        if cells[cell] == "G":
            return ways[cell]
        if cells[cell] == "H":
            continue
        row, column = divmod(cell, width)
        ahead = (max(column - 1, 0), min(row + 1, len(lake) - 1), min(column + 1, width - 1), max(row - 1, 0))
        for action, to in zip(FrozenLake.actions, ahead, strict=True):
            after = row * width + to if action in ("Left", "Right") else to * width + column
            if after not in ways:
                ways[after] = [*ways[cell], action]
                waiting.append(after)
    return None


def game(
    *,
    size: int | None = None,
    holes: float | None = None,
    map: list[str] | None = None,
    slippery: bool = False,
    step_reward: float = 0.0,
    goal_reward: float = 1.0,
    hole_reward: float = 0.0,
    tile: int = 28,
) -> FrozenLake:
    """Makes lakes from the seed, with start, goal and holes anywhere, or plays one given lake.

    Args:
        size: Side of a made lake in squares; 4 if not given.
        holes: Share of the squares of a made lake, apart from start and goal, that are holes; 0.2 if not given.
        map: Rows of a lake instead: S start, F frozen, H hole, G goal, as in `[SFFF, FHFH, FFFH, HFFG]`.
        slippery: The player goes in the chosen direction one time in three, else to one of its two sides.
        step_reward: Reward of every action.
        goal_reward: Reward added when the goal is reached.
        hole_reward: Reward added when the player falls into a hole.
        tile: Side of a square in the image, in pixels. 28 is one token of Qwen2.5-VL, 32 of Qwen3-VL.

    Raises ValueError for options that do not fit, and DataError when no lake with so many holes can be crossed.
    """
    if tile < SMALLEST_TILE:
        raise ValueError(f"frozenlake: tile is {tile}; it must be at least {SMALLEST_TILE} pixels")
    rewards = (step_reward, goal_reward, hole_reward)
    if map is not None:
        if given := [name for name, value in (("size", size), ("holes", holes)) if value is not None]:
            raise ValueError(f"frozenlake: {', '.join(given)} and map exclude each other; leave one out")
        lake = checked(map)
        return FrozenLake(lambda seed: lake, slippery, rewards, tile)
    side, share = 4 if size is None else size, 0.2 if holes is None else holes
    if side < 2:
        raise ValueError(f"frozenlake: size is {side}; it must be at least 2 squares")
    if not 0 <= share < 1:
        raise ValueError(f"frozenlake: holes is {share}; it is a share, at least 0 and below 1")
    generate(0, side, share)  # a share that leaves no way is found out now
    return FrozenLake(lambda seed: generate(seed, side, share), slippery, rewards, tile)


def checked(rows: Sequence[str]) -> Lake:
    """Returns the lake. Raises ValueError for rows that are no lake, or one that cannot be crossed."""
    lake = tuple(rows)
    cells, shown = "".join(lake), "/".join(lake)
    if not cells or any(len(row) != len(lake[0]) for row in lake):
        raise ValueError(f"frozenlake: the rows of the map {shown!r} must be of one length, and not empty")
    if wrong := set(cells) - set("SFHG"):
        raise ValueError(f"frozenlake: the map {shown!r} holds {min(wrong)!r}; use S start, F frozen, H hole, G goal")
    if cells.count("S") != 1:
        raise ValueError(f"frozenlake: the map {shown!r} has {cells.count('S')} starts (S); it needs one")
    if shortest_way(lake, cells.index("S")) is None:
        raise ValueError(f"frozenlake: the map {shown!r} has no way from S to a goal (G); take holes (H) away")
    return lake


@lru_cache(maxsize=1024)
def generate(seed: int, size: int, holes: float) -> Lake:
    """Makes a lake of `size` x `size` squares that can be crossed; the same for the same arguments.

    The share `holes` of the squares that are neither start nor goal are holes, rounded to a whole number. Raises
    DataError when none of `ATTEMPTS` lakes can be crossed.
    """
    rng = random.Random(f"frozenlake/{size}/{holes}/{seed}")
    others = size**2 - 2
    n_holes = round(holes * others)
    cells = list("SG" + "H" * n_holes + "F" * (others - n_holes))
    for _ in range(ATTEMPTS):
        rng.shuffle(cells)
        lake = tuple("".join(cells[row * size : (row + 1) * size]) for row in range(size))
        if shortest_way(lake, cells.index("S")) is not None:
            return lake
    raise DataError(
        f"frozenlake: no lake of size {size} with {n_holes} holes can be crossed, in {ATTEMPTS} attempts with seed "
        f"{seed}: choose a smaller share of holes"
    )


_ICE, _EDGE, _HOLE, _RIM = (214, 234, 248), (150, 188, 214), (22, 44, 84), (92, 132, 172)
_FLAG, _POLE, _SKIN, _COAT = (24, 150, 60), (70, 50, 40), (250, 205, 160), (205, 30, 40)
_SMOOTHING = 4
"""Factor by which figures are drawn larger and then reduced, for smooth edges."""


@cache
def _tiles(tile: int) -> dict[str, np.ndarray]:
    """Image of each character of `FrozenLake.state_key`, uint8 [tile, tile, 3]."""
    return {character: _drawn(character, tile) for character in ".OGPX*"}


def _drawn(character: str, tile: int) -> np.ndarray:
    side = tile * _SMOOTHING
    pil = PIL.Image.new("RGB", (side, side), _ICE)
    draw = PIL.ImageDraw.Draw(pil)

    def scaled(*numbers: float) -> list[float]:
        """Converts hundredths of the side to pixels; pairs are (x, y) from the upper left corner."""
        return [number * side / 100 for number in numbers]

    draw.rectangle((0, 0, side - 1, side - 1), outline=_EDGE, width=_SMOOTHING)
    if character in "OX":
        draw.ellipse(scaled(8, 8, 92, 92), fill=_HOLE, outline=_RIM, width=_SMOOTHING)
    if character in "G*":
        draw.rectangle(scaled(74, 8, 80, 92), fill=_POLE)
        draw.polygon(scaled(74, 8, 74, 48, 20, 28), fill=_FLAG)
    if character in "PX*":
        draw.polygon(scaled(38, 44, 62, 44, 78, 92, 22, 92), fill=_COAT)
        draw.ellipse(scaled(34, 14, 66, 46), fill=_SKIN, outline=_COAT, width=_SMOOTHING)
    return np.asarray(pil.resize((tile, tile), PIL.Image.Resampling.BOX))
