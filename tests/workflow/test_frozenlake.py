"""FrozenLake against gymnasium's own environment, brute force, and lakes worked out by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.tasks import frozenlake
from npu_vlrl.tasks.frozenlake import FrozenLake, checked, game, generate, shortest_way
from npu_vlrl.types import DataError, EpisodeStatus, Task
from npu_vlrl.workflow.environments import environments

PUBLISHED = ["SFFF", "FHFH", "FFFH", "HFFG"]
"""gymnasium's map 4x4."""


def started(seed: int = 0, **options: object) -> FrozenLake:
    made = game(**options)  # type: ignore[arg-type]
    made.start(seed)
    return made


def cells(lake: tuple[str, ...]) -> str:
    return "".join(lake)


def reachable(lake: tuple[str, ...]) -> bool:
    """Floods the lake with NumPy: no code in common with the search."""
    grid = np.array([list(row) for row in lake])
    wet = grid == "S"
    for _ in range(grid.size):
        grown = np.pad(wet & (grid != "H"), 1)
        wet = grown[1:-1, 1:-1] | grown[:-2, 1:-1] | grown[2:, 1:-1] | grown[1:-1, :-2] | grown[1:-1, 2:]
    return bool(wet[grid == "G"].any())


@given(st.integers(0, 2**32 - 1), st.integers(2, 7), st.sampled_from([0.0, 0.2, 0.5, 0.8]))
@settings(max_examples=50, deadline=None)
def test_lakes_can_be_crossed_and_have_what_was_asked_for(seed: int, size: int, holes: float) -> None:
    lake = generate(seed, size, holes)
    assert [len(row) for row in lake] == [size] * size
    count = Counter(cells(lake))
    assert (count["S"], count["G"], count["H"]) == (1, 1, round(holes * (size**2 - 2)))
    assert reachable(lake)
    generate.cache_clear()
    assert generate(seed, size, holes) == lake


def test_lakes_differ_over_seeds_and_none_is_solved_at_the_start() -> None:
    keys = {started(seed, size=5).state_key() for seed in range(50)}
    assert len(keys) == 50
    assert not any("*" in key or "X" in key for key in keys)


def test_a_lake_that_cannot_be_crossed_is_not_taken_for_one_that_can() -> None:
    assert not reachable(("SH", "HG")) and shortest_way(("SH", "HG"), 0) is None
    assert reachable(("SF", "HG")) and shortest_way(("SF", "HG"), 0) == ["Right", "Down"]


@given(st.integers(0, 10_000), st.booleans(), st.lists(st.sampled_from(FrozenLake.actions), max_size=30))
@settings(max_examples=50, deadline=None)
def test_moves_are_those_of_the_registered_environment(seed: int, slippery: bool, actions: list[str]) -> None:
    ours = started(seed, size=5, slippery=slippery)
    real = gymnasium.make("FrozenLake-v1", desc=list(ours.lake), is_slippery=slippery)
    assert at(ours) == real.reset(seed=seed)[0]
    for action in actions:
        cell, reward, terminated, _, _ = real.step({"Left": 0, "Down": 1, "Right": 2, "Up": 3}[action])
        move = ours.act(action)
        assert at(ours) == cell
        assert (sum(move.terms.values()), move.over, move.solved) == (reward, terminated, reward == 1)
        if terminated:
            break


def at(made: FrozenLake) -> int:
    """Where the state's text has the player."""
    text = made.state_key().replace("\n", "")
    (cell,) = [index for index, character in enumerate(text) if character in "PX*"]
    return cell


def test_the_published_map_by_hand() -> None:
    made = started(map=PUBLISHED, step_reward=-0.1, goal_reward=5, hole_reward=-2)
    assert made.state_key() == "P...\n.O.O\n...O\nO..G"
    assert made.solution() == ["Down", "Down", "Right", "Down", "Right", "Right"]
    assert dict(made.act("Up").terms) == {"step": -0.1, "goal": 0, "hole": 0}  # the edge
    assert made.state_key() == "P...\n.O.O\n...O\nO..G"
    made.act("Right")
    assert made.solution() == ["Right", "Down", "Down", "Down", "Right"]
    lost = made.act("Down")
    assert (dict(lost.terms), lost.solved, lost.over) == ({"step": -0.1, "goal": 0, "hole": -2}, False, True)
    assert made.state_key() == "....\n.X.O\n...O\nO..G"
    assert made.solution() is None
    made.start(7)
    *before, last = [made.act(action) for action in ("Down", "Down", "Right", "Down", "Right", "Right")]
    assert not any(move.over for move in before)
    assert (dict(last.terms), last.solved, last.over) == ({"step": -0.1, "goal": 5, "hole": 0}, True, True)
    assert made.state_key() == "....\n.O.O\n...O\nO..*"


@pytest.mark.parametrize("seed", range(8))
def test_the_solution_solves_and_no_shorter_list_does(seed: int) -> None:
    made = started(seed, size=4, holes=0.3)
    solution = made.solution()
    assert solution

    def ends_solved(actions: tuple[str, ...]) -> bool:
        made.start(seed)
        for action in actions:
            move = made.act(action)
            if move.over:
                return move.solved
        return False

    assert ends_solved(tuple(solution))
    for length in range(1, min(len(solution), 5)):
        assert not any(ends_solved(actions) for actions in itertools.product(made.actions, repeat=length))


def test_slippery_ice_by_its_published_odds() -> None:
    """From the middle of open ice, Right goes right, up and down with 1/3 each, and never left."""
    made = game(map=["FFF", "FSF", "FFG"], slippery=True)
    counts: Counter[int] = Counter()
    for seed in range(600):
        made.start(seed)
        made.act("Right")
        counts[at(made)] += 1
    assert set(counts) == {1, 5, 7}
    assert all(150 < count < 250 for count in counts.values())  # 200 expected, standard deviation 11.5
    assert made.solution() is None
    assert "slippery" in made.rules and "slippery" not in game().rules


def test_a_seed_decides_how_the_player_slips() -> None:
    def path(seed: int) -> list[str]:
        made = started(seed, map=["S" + "F" * 7, *["F" * 8] * 6, "F" * 7 + "G"], slippery=True)
        return [made.state_key() for _ in range(12) if not made.act("Down").over]

    assert path(3) == path(3)
    assert len({tuple(path(seed)) for seed in range(10)}) > 5


def test_equal_states_have_equal_images_and_keys_however_they_came_about() -> None:
    made = started(map=["SFF", "FHF", "FFG"])
    seen: dict[str, str] = {}
    for actions in itertools.product(made.actions, repeat=4):
        made.start(0)
        for action in actions:
            if made.act(action).over:
                break
        assert seen.setdefault(made.state_key(), made.picture().hash) == made.picture().hash
    assert len(seen) == len(set(seen.values())) == 9


def test_the_image_shows_each_square_where_it_is() -> None:
    tile = 20
    made = started(map=["SFH", "FGF"], tile=tile)
    assert made.picture().size == (3 * tile, 2 * tile)
    before = squares(made, tile)
    assert same(before[0, 1], before[1, 0]) and same(before[0, 1], before[1, 2])  # ice
    kinds = [before[0, 0], before[0, 1], before[0, 2], before[1, 1]]
    assert not any(same(a, b) for a, b in itertools.combinations(kinds, 2))
    made.act("Down")
    after = squares(made, tile)
    assert same(after[0, 0], before[0, 1]) and same(after[1, 0], before[0, 0])  # the player has moved; S is ice
    made.act("Right")
    goal = squares(made, tile)[1, 1]
    assert not same(goal, before[1, 1]) and not same(goal, before[0, 0])
    red = goal[..., 0].astype(int) - goal[..., 2] > 100
    assert red.mean() > 0.1  # the player is seen over the flag


def squares(made: FrozenLake, tile: int) -> np.ndarray:
    """[rows, columns, tile, tile, 3]"""
    rows, columns = len(made.lake), len(made.lake[0])
    return made.picture().rgb.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a == b).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 7}, "tile is 7; it must be at least 8"),
        ({"size": 1}, "size is 1; it must be at least 2"),
        ({"holes": 1.0}, "holes is 1.0; it is a share"),
        ({"holes": -0.1}, "holes is -0.1"),
        ({"size": 4, "map": PUBLISHED}, "size and map exclude each other"),
        ({"holes": 0.0, "map": PUBLISHED}, "holes and map exclude each other"),
        ({"map": []}, "must be of one length, and not empty"),
        ({"map": ["SF", "G"]}, "the rows of the map 'SF/G' must be of one length"),
        ({"map": ["SX", "FG"]}, "the map 'SX/FG' holds 'X'"),
        ({"map": ["FF", "FG"]}, "has 0 starts"),
        ({"map": ["SS", "FG"]}, "has 2 starts"),
        ({"map": ["SF", "FF"]}, "has no way from S to a goal"),
        ({"map": ["SH", "HG"]}, "has no way from S to a goal"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="^frozenlake: ") as refused:
        game(**options)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_a_map_may_have_several_goals_and_any_shape() -> None:
    assert checked(["GFFSFG"]) == ("GFFSFG",)
    assert started(map=["GFFSFG"]).solution() == ["Right", "Right"]


def test_too_many_holes_end_the_search_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozenlake, "ATTEMPTS", 20)
    with pytest.raises(DataError, match=r"size 20 with 398 holes can be crossed, in 20 .*smaller share of holes"):
        generate(0, 20, 0.999)


def test_an_episode_through_the_registry_is_lost_in_a_hole_and_won_at_the_flag() -> None:
    config = EnvironmentConfig(name="frozenlake", options={"map": PUBLISHED}, format="no_think", max_actions=6)

    def step(answer: str) -> tuple[EpisodeStatus | None, float]:
        environment = environments(config).new()
        asyncio.run(environment.reset(Task("t", (), None, "frozenlake", {"seed": 1})))
        done = asyncio.run(environment.step(f"<answer>{answer}</answer>", ()))
        return done.status, done.reward

    assert step("Right,Down,Down") == (EpisodeStatus.LOST, 0.5)
    assert step("Down,Down,Right,Down,Right,Right") == (EpisodeStatus.SOLVED, 1.5)
    assert step("Down") == (None, 0.5)
