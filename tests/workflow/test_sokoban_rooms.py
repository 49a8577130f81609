"""Made rooms can be solved, and solutions are shortest: compared with plain searches over everything."""

from __future__ import annotations

import importlib
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.tasks.sokoban.generate import generate
from npu_vlrl.tasks.sokoban.levels import level_text, parse_level, read_levels
from npu_vlrl.tasks.sokoban.rules import ACTIONS, Room, State
from npu_vlrl.tasks.sokoban.solve import push_distances, solve
from npu_vlrl.types import DataError


def shortest(state: State, most: int = 10**9) -> int | None:
    """Moves of a shortest solution, by breadth-first search with the rules alone; None when there is none."""
    moves, waiting = {state: 0}, deque([state])
    while waiting and len(moves) < most:
        here = waiting.popleft()
        if here.solved:
            return moves[here]
        for action in ACTIONS:
            after = here.moved(action)
            if after not in moves:
                moves[after] = moves[here] + 1
                waiting.append(after)
    return None


def solves(state: State, actions: list[str]) -> bool:
    for action in actions:
        assert not state.solved
        state = state.moved(action)
    return state.solved


SHAPES = [(5, 1), (5, 2), (6, 1)]
rooms = st.builds(
    lambda seed, shape: generate(seed, *shape, 1, None),
    st.integers(0, 10**6),
    st.sampled_from([(5, 1), (5, 2), (6, 1)]),
)


@settings(max_examples=50, deadline=None)
@given(rooms, st.lists(st.sampled_from(ACTIONS), max_size=15))
def test_the_solution_is_a_shortest_one(state: State, actions: list[str]) -> None:
    for action in actions:  # not only states that can be solved
        state = state.moved(action)
    expected, found = shortest(state), solve(state)
    assert (found is None) == (expected is None)
    if found is not None:
        assert solves(state, found) and len(found) == expected


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_solution_is_a_shortest_one_with_two_boxes_in_a_larger_room(seed: int) -> None:
    state = generate(seed, 7, 2, 1, None)
    found = solve(state)
    assert found is not None and solves(state, found)
    assert len(found) == shortest(state)


def test_solutions_by_hand() -> None:
    assert solve(parse_level(["######", "#@ $.#", "######"])) == ["Right", "Right"]
    assert solve(parse_level(["#####", "#@  #", "# $.#", "#   #", "#####"])) == ["Down", "Right"]
    assert solve(parse_level(["#####", "#.$@#", "#####"])) == ["Left"]
    around = parse_level(["######", "#    #", "#.$  #", "#@   #", "######"])
    assert solve(around) == ["Right", "Right", "Up", "Left"]


@pytest.mark.parametrize(
    "rows",
    [
        ["#####", "#$@.#", "#####"],  # in a corner
        ["#####", "#@  #", "# .##", "# $ #", "#####"],  # along the lower wall for ever
    ],
)
def test_a_box_that_cannot_get_to_a_target_is_seen_at_once(rows: list[str]) -> None:
    state = parse_level(rows)
    assert shortest(state) is None
    assert not state.boxes <= push_distances(state.room).keys()
    assert solve(state) is None


def test_two_boxes_for_the_same_target_have_no_solution() -> None:
    # boxes stay in their row; alone, each could get to the target on the right, so the search runs out of states
    state = parse_level(["#######", "#@$ $.#", "#.    #", "#######"])
    assert state.boxes <= push_distances(state.room).keys()
    assert shortest(state) is None and solve(state) is None


def test_the_search_gives_up_at_its_limit() -> None:
    state = generate(1, 7, 2, 8, None)
    assert solve(state) is not None
    assert solve(state, limit=3) is None
    least = next(limit for limit in range(1, 10_000) if solve(state, limit))
    assert least > len(solve(state) or [])  # one state is looked at for each action, and the solved one


def pushes_alone(room: Room, box: int) -> int | None:
    """Pushes of a box alone to a target, by search forwards, with a player that is always where it is needed."""
    pushes, waiting = {box: 0}, deque([box])
    while waiting:
        cell = waiting.popleft()
        if cell in room.targets:
            return pushes[cell]
        for step in room.steps.values():
            if {cell - step, cell + step} <= room.floor and cell + step not in pushes:
                pushes[cell + step] = pushes[cell] + 1
                waiting.append(cell + step)
    return None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(5, 1), (7, 2), (9, 3)]))
def test_push_distances_are_those_of_a_search_forwards(seed: int, shape: tuple[int, int]) -> None:
    room = generate(seed, *shape, 1, None).room
    distances = push_distances(room)
    assert {cell: pushes_alone(room, cell) for cell in room.floor} == {cell: distances.get(cell) for cell in room.floor}


def test_a_bound_that_is_too_high_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [generate(seed, 6, 2, 8, None) for seed in range(20)]
    expected = [shortest(state) for state in states]
    assert [len(solve(state) or []) for state in states] == expected
    module = importlib.import_module(push_distances.__module__)
    monkeypatch.setattr(module, "push_distances", lambda room: {c: 5 * n for c, n in push_distances(room).items()})
    found = [solve(state) or [] for state in states]
    assert all(solves(state, actions) for state, actions in zip(states, found, strict=True))
    assert [len(actions) for actions in found] != expected


def test_the_replay_of_a_solution_can_fail() -> None:
    state = generate(0, 6, 1, 6, None)
    found = solve(state) or []
    assert solves(state, found)
    assert not solves(state, found[:-1])
    assert not solves(state, found[1:])


@pytest.mark.parametrize(("size", "boxes", "count"), [(5, 1, 200), (5, 2, 100), (6, 3, 50), (7, 2, 100), (8, 3, 15)])
def test_every_made_room_can_be_solved_and_none_is_begun(size: int, boxes: int, count: int) -> None:
    states = [generate(seed, size, boxes, 1, None) for seed in range(count)]
    for state in states:
        assert (state.room.width, state.room.height, len(state.boxes)) == (size, size, boxes)
        assert len(state.room.targets) == boxes and state.on_target == 0
        assert parse_level(level_text(state).split("\n")) == state  # in one piece, closed, one player
        found = solve(state)
        assert found and solves(state, found)
    assert len(set(states)) > count / 2


def test_every_seed_has_its_room_whatever_came_before() -> None:
    first = [level_text(generate(seed, 7, 2, 1, None)) for seed in range(10)]
    generate.cache_clear()
    assert [level_text(generate(seed, 7, 2, 1, None)) for seed in reversed(range(10))] == first[::-1]
    assert len(set(first)) == 10


def test_a_seed_means_the_same_room_in_every_version() -> None:
    # recorded episodes name their room by its seed: a change here makes them worthless
    assert level_text(generate(0, 5, 1, 1, None)) == "#####\n#@###\n#$###\n#. ##\n#####"


@pytest.mark.parametrize(("least", "most"), [(3, 3), (5, 8), (1, 2), (7, None)])
def test_limits_of_the_solution_are_kept(least: int, most: int | None) -> None:
    lengths = [shortest(generate(seed, 6, 1, least, most)) for seed in range(20)]
    assert all(length is not None and least <= length <= (most or length) for length in lengths)
    free = [shortest(generate(seed, 6, 1, 1, None)) or 0 for seed in range(20)]
    assert not all(least <= length <= (most or length) for length in free)  # it takes the limits


def test_limits_that_no_room_keeps() -> None:
    with pytest.raises(DataError, match="size 5 with 1 boxes, solved in at least 30 and at most 40 actions.*seed 7"):
        generate(7, 5, 1, 30, 40)
    with pytest.raises(DataError, match="size 5 with 7 boxes, solved in at least 1 and any number of actions"):
        generate(0, 5, 7, 1, None)


def test_boxoban_levels_are_solved() -> None:
    for state in (*read_levels("unfiltered_test_000")[:4], read_levels("hard_003")[1]):
        found = solve(state, limit=60_000)
        assert found is not None and solves(state, found)
