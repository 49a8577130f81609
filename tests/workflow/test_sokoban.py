"""Sokoban's rules, rewards and images: levels worked out by hand, and another implementation on a grid of letters."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

import npu_vlrl.tasks.sokoban as sokoban
from npu_vlrl.config import EnvironmentConfig
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.tasks.sokoban.draw import draw
from npu_vlrl.tasks.sokoban.generate import generate
from npu_vlrl.tasks.sokoban.levels import SHIPPED, level_text, parse_level, read_levels
from npu_vlrl.tasks.sokoban.rules import ACTIONS, Room, State
from npu_vlrl.types import EpisodeStatus, Task
from npu_vlrl.workflow.environments import environments
from npu_vlrl.workflow.environments.game import Game

SPRITES = Path(sokoban.__file__).parent / "assets" / "sprites"
DELTAS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
ROOMS = [*(generate(seed, 6, 2, 1, None) for seed in range(10)), *read_levels("unfiltered_test_000")[:10]]


def play(level: str, actions: str) -> tuple[sokoban.Sokoban, list[dict[str, float]]]:
    """A game started in a level, and the terms of the moves, named by their first letters."""
    game = sokoban.Sokoban(lambda seed: parse_level(level.strip("\n").split("\n")), tile=4)
    game.start(0)
    names = {action[0]: action for action in ACTIONS}
    return game, [dict(game.act(names[letter]).terms) for letter in actions]


def letters_after(level: str, action: str) -> str:
    """Another implementation of the rules: what stands on the cells of a text changes, one cell at a time."""
    rows = [list(line) for line in level.split("\n")]
    (row, column), *_ = [(r, c) for r, line in enumerate(rows) for c, letter in enumerate(line) if letter in "@+"]
    down, right = DELTAS[action]

    def shift(r: int, c: int) -> bool:
        """Moves what stands on a cell to the next, as far as that is free."""
        ahead = rows[r + down][c + right]
        if ahead in "#$*":
            return False
        thing = {"@": "@", "+": "@", "$": "$", "*": "$"}[rows[r][c]]
        rows[r][c] = "." if rows[r][c] in "+*" else " "
        rows[r + down][c + right] = {"@": "+", "$": "*"}[thing] if ahead == "." else thing
        return True

    if rows[row + down][column + right] in "$*":
        shift(row + down, column + right)
    shift(row, column)
    return "\n".join("".join(line) for line in rows)


TWO_BOXES = """
#######
#@$.$.#
#######
"""


def test_the_rewards_of_a_game_by_hand() -> None:
    game, terms = play(TWO_BOXES, "LR")
    assert terms == [
        {"step": -0.1, "box": 0.0, "solved": 0.0},  # into the wall
        {"step": -0.1, "box": 1.0, "solved": 0.0},  # the first box on its target
    ]
    assert game.state_key() == "#######\n# @*$.#\n#######"
    move = game.act("Right")
    assert dict(move.terms) == {"step": -0.1, "box": 0.0, "solved": 0.0}  # the second box stands behind the first
    assert not move.solved and not move.over
    assert game.state_key() == "#######\n# @*$.#\n#######"


def test_a_solved_game_earns_ten_and_is_over() -> None:
    game, _ = play("#####\n#@$.#\n#####", "")
    move = game.act("Right")
    assert dict(move.terms) == {"step": -0.1, "box": 1.0, "solved": 10.0}
    assert move.solved and move.over
    with pytest.raises(AssertionError, match="the game is over"):
        game.act("Left")


def test_pushing_a_box_off_its_target_and_along_targets() -> None:
    level = "########\n#@*..$ #\n#   $  #\n########"
    game, terms = play(level, "RR")
    assert [term["box"] for term in terms] == [0.0, 0.0]  # from target to target
    assert game.state_key() == "########\n# .+*$ #\n#   $  #\n########"
    game, terms = play("#####\n#@* #\n# $.#\n#####", "R")
    assert terms == [{"step": -0.1, "box": -1.0, "solved": 0.0}]
    assert game.state_key() == "#####\n# +$#\n# $.#\n#####"


@pytest.mark.parametrize("level", ["#####\n#.@$#\n#####", "######\n#@$$.#\n#   .#\n######", "######\n#@*$.#\n######"])
def test_a_blocked_push_leaves_all_as_it_is(level: str) -> None:
    game, terms = play(level, "R")
    assert game.state_key() == level and terms == [{"step": -0.1, "box": 0.0, "solved": 0.0}]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ROOMS), st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_the_rules_are_those_of_the_other_implementation(state: State, actions: list[str]) -> None:
    for action in actions:
        expected = letters_after(level_text(state), action)
        state = state.moved(action)
        assert level_text(state) == expected


def test_the_comparison_with_the_other_implementation_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    level = "######\n#@$$ #\n#  ..#\n######"
    start = parse_level(level.split("\n"))
    assert level_text(start.moved("Right")) == letters_after(level, "Right")

    def strong(room: Room, player: int, boxes: frozenset[int], action: str) -> tuple[int, frozenset[int]]:
        step = room.steps[action]
        line = [cell for cell in (player + step, player + 2 * step) if cell in boxes]
        return player + step, boxes - {*line} | {cell + step for cell in line}

    monkeypatch.setattr(Room, "moved", strong)  # pushes two boxes
    assert level_text(start.moved("Right")) != letters_after(level, "Right")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ROOMS), st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_walls_stay_boxes_stay_and_every_move_can_be_undone(state: State, actions: list[str]) -> None:
    for action in actions:
        after = state.moved(action)
        assert after.room is state.room and len(after.boxes) == len(state.boxes)
        assert after.player in after.room.floor and after.boxes <= after.room.floor
        assert after.player not in after.boxes
        if after != state:
            step = after.player - state.player
            assert step == state.room.steps[action]
            pulled = {after.player + step: after.player} if after.boxes != state.boxes else {}
            undone = frozenset(pulled.get(box, box) for box in after.boxes)
            assert State(after.room, after.player - step, undone) == state
        state = after


@settings(max_examples=30, deadline=None)
@given(st.integers(-3, 10_000), st.lists(st.sampled_from(ACTIONS), max_size=12))
def test_seed_and_actions_alone_decide(seed: int, actions: list[str]) -> None:
    games = [sokoban.game(size=5), sokoban.game(size=5)]
    seen = []
    for game in games:
        generate.cache_clear()
        game.start(seed)
        seen.append([game.state_key(), game.picture().hash])
        for action in actions:
            if not game.state.solved:
                seen[-1] += [sorted(game.act(action).terms.items()), game.state_key(), game.picture().hash]
    assert seen[0] == seen[1]


def test_a_game_starts_again() -> None:
    game: Game = sokoban.game(size=7, boxes=2)
    game.start(3)
    first = game.state_key()
    for action in ACTIONS:
        game.act(action)
    game.start(4)
    assert game.state_key() != first
    game.start(3)
    assert game.state_key() == first


def test_the_solution_goes_on_from_where_the_game_is() -> None:
    game, _ = play("######\n#@ $.#\n######", "")
    assert game.solution() == ["Right", "Right"]
    game.act("Right")
    assert game.solution() == ["Right"]
    assert game.act("Right").solved
    assert game.solution() == []


def test_the_seed_chooses_the_level() -> None:
    levels = read_levels("hard_003")
    game = sokoban.game(levels="hard_003")
    for seed, number in ((0, 0), (331, 331), (332, 0), (1000, 4), (-1, 331)):
        game.start(seed)
        assert game.state == levels[number]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("; first\n#####\n#@$.#\n#####\n\n; second\n######\n#@ $.#\n######\n")
    game = sokoban.game(levels=str(tmp_path / "own.txt"), tile=14)
    game.start(1)
    assert game.state_key() == "######\n#@ $.#\n######"
    assert game.picture().size == (6 * 14, 3 * 14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, "size is 4; it must be at least 5"),
        ({"boxes": 0}, "boxes is 0; a room of size 6 holds from 1 to 14"),
        ({"size": 5, "boxes": 8}, "boxes is 8; a room of size 5 holds from 1 to 7"),
        ({"tile": 3}, "tile is 3; it must be at least 4"),
        ({"min_solution": 5, "max_solution": 4}, "max_solution 4 is below min_solution 5"),
        ({"levels": "hard_003", "size": 5, "boxes": 1}, "levels and size, boxes exclude each other"),
        ({"levels": "hard_004"}, "no levels at 'hard_004'.*hard_003, unfiltered_test_000"),
        ({"size": 5, "min_solution": 40}, "no sokoban room of size 5 with 1 boxes, solved in at least 40 .* seed 0"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sokoban.game(**options)


def test_the_image_is_made_of_the_sprites() -> None:
    names = {"#": "wall", " ": "floor", ".": "box_target", "$": "box", "*": "box_on_target"}
    for player, name in (("@", "player"), ("+", "player_on_target")):
        level = ["######", f"#{player}$$ #", "#*.  #", "######"]
        if player == "@":
            level[2] = "#*.. #"
        image = draw(parse_level(level), 16)
        assert image.size == (96, 64)
        for row, line in enumerate(level):
            for column, letter in enumerate(line):
                stored = Pillow.open(SPRITES / f"{(names | {player: name})[letter]}.png").convert("RGB")
                drawn = image.rgb[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
                assert np.array_equal(drawn, np.asarray(stored)), letter


def test_larger_tiles_repeat_pixels_and_smaller_ones_average_them() -> None:
    state = parse_level(["#####", "#@$.#", "#####"])
    whole = draw(state, 16).rgb
    assert np.array_equal(draw(state, 32).rgb, whole.repeat(2, 0).repeat(2, 1))
    mean = whole.reshape(24, 2, 40, 2, 3).mean((1, 3))
    assert np.abs(draw(state, 8).rgb - mean).max() <= 1
    assert draw(state, 28).size == (5 * 28, 3 * 28)


@pytest.mark.parametrize("tile", [sokoban.SMALLEST_TILE, 14, 28, 32])
def test_images_and_keys_are_equal_exactly_for_equal_states(tile: int) -> None:
    state = parse_level(["#######", "#@$ . #", "#  *  #", "#######"])
    seen = [state]
    rng = random.Random(0)
    for _ in range(300):
        state = state.moved(rng.choice(ACTIONS))
        seen.append(state)
    states = set(seen)
    assert len(states) > 10
    assert len({draw(state, tile).hash for state in seen}) == len(states)
    assert len({level_text(state) for state in seen}) == len(states)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_says_where_it_comes_from(name: str) -> None:
    folder = SPRITES.parent / "levels"
    assert f"{name}.txt" in (folder / "ORIGIN.txt").read_text()
    assert "Apache License" in (folder / "LICENSE.txt").read_text()
    assert "MIT License" in (SPRITES / "LICENSE.txt").read_text()


def test_the_assets_are_read_when_used() -> None:
    code = (
        "import npu_vlrl.tasks.sokoban as sokoban\n"
        "from npu_vlrl.tasks.sokoban.draw import _sprites\n"
        "from npu_vlrl.tasks.sokoban.levels import read_levels\n"
        "assert _sprites.cache_info().currsize == read_levels.cache_info().currsize == 0\n"
        "game = sokoban.game(levels='hard_003')\n"
        "game.start(0)\n"
        "game.picture()\n"
        "assert _sprites.cache_info().currsize == read_levels.cache_info().currsize == 1\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("size", [5, 6, 7, 10])
def test_a_cell_is_one_token(size: int) -> None:
    game = sokoban.game(size=size)
    game.start(0)
    assert ImageProcessor().describe(game.picture()).n_tokens == size * size  # Qwen2.5-VL
    game = sokoban.game(size=size, tile=32)
    game.start(0)
    assert ImageProcessor(patch_size=16).describe(game.picture()).n_tokens == size * size  # Qwen3-VL
    game = sokoban.game(size=size, tile=20)
    game.start(0)
    assert ImageProcessor().describe(game.picture()).n_tokens != size * size


def test_an_episode_of_a_configured_game(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("; one\n######\n#@$ .#\n#    #\n######\n")
    config = EnvironmentConfig(name="sokoban", options={"levels": str(tmp_path / "own.txt"), "tile": 8})
    environment = environments(config).new()
    (opening,) = asyncio.run(environment.reset(Task("sokoban/0", (), None, "sokoban", {"seed": 3})))
    assert opening.text.startswith(sokoban.RULES) and opening.images[0].size == (48, 32)
    first = asyncio.run(environment.step("<think>hm</think><answer>Down, Up, Left</answer>", ()))
    assert first.verdict is not None and first.status is None
    assert first.verdict.terms == pytest.approx({"step": -0.3, "box": 0.0, "solved": 0.0, "format": 0.5})
    assert first.reward == pytest.approx(0.2)
    assert first.messages[0].images == opening.images  # the player is back where it was
    last = asyncio.run(environment.step("<think>go</think><answer>Right, Right, Down</answer>", ()))
    assert last.verdict is not None and last.status is EpisodeStatus.SOLVED
    assert last.verdict.terms == pytest.approx({"step": -0.2, "box": 1.0, "solved": 10.0, "format": 0.5})
    assert last.reward == pytest.approx(11.3)
    assert environment.state_key() == "######\n#  @*#\n#    #\n######"  # nothing is done after the last box
