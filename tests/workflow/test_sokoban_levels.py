"""Levels as text: what is read, what is written back, and what is refused with which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_vlrl.tasks.sokoban as sokoban
from npu_vlrl.tasks.sokoban.generate import generate
from npu_vlrl.tasks.sokoban.levels import SHIPPED, level_text, parse_level, read_levels
from npu_vlrl.types import DataError

LEVELS = Path(sokoban.__file__).parent / "assets" / "levels"


def test_a_level_by_hand() -> None:
    state = parse_level(["#####", "#+$ #", "# *.#", "# $ #", "#####"])
    assert (state.room.width, state.room.height, state.player) == (5, 5, 6)
    assert state.boxes == {7, 12, 17}
    assert state.room.targets == {6, 12, 13}
    assert state.room.floor == {6, 7, 8, 11, 12, 13, 16, 17, 18}
    assert state.on_target == 1 and not state.solved
    assert state.room.reach(6, state.boxes) == {6, 11, 16}
    assert state.room.reach(8, state.boxes) == {8, 13, 18}


@pytest.mark.parametrize(("name", "count"), [("hard_003", 332), ("unfiltered_test_000", 1000)])
def test_the_shipped_levels_are_all_read_as_written(name: str, count: int) -> None:
    assert name in SHIPPED
    written = re.split(r"^; *\d+\n", (LEVELS / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    levels = read_levels(name)
    assert len(levels) == len(written) == count
    for state, text in zip(levels, written, strict=True):
        assert level_text(state) == text.strip("\n")
        assert (state.room.width, state.room.height, len(state.boxes)) == (10, 10, 4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(5, 9), st.integers(1, 3), st.lists(st.sampled_from(sokoban.ACTIONS)))
def test_what_is_written_is_read_back(seed: int, size: int, boxes: int, actions: list[str]) -> None:
    state = generate(seed, size, boxes, 1, None)
    for action in actions:
        state = state.moved(action) if not state.moved(action).solved else state
    assert parse_level(level_text(state).split("\n")) == state


def test_short_rows_and_what_cannot_be_reached() -> None:
    state = parse_level(["  ####", "###  #", "#@ $.#####", "###  #   #", "  ########"])
    assert level_text(state).split("\n") == [
        "##########",
        "###  #####",
        "#@ $.#####",
        "###  #####",
        "##########",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"has 0 players \(@ or \+\); it needs one"),
        (["#####", "# $.#", "#####"], r"has 0 players"),
        (["######", "#@$.@#", "######"], r"has 2 players"),
        (["######", "#@$.+#", "######"], r"has 2 players"),
        (["#####", "#@ .#", "#####"], r"has 0 boxes \(\$ or \*\) and 1 targets"),
        (["#####", "#@  #", "#####"], r"has 0 boxes \(\$ or \*\) and 0 targets"),
        (["######", "#@$$.#", "######"], r"has 2 boxes \(\$ or \*\) and 1 targets"),
        (["#####", "#+$.#", "#####"], r"has 1 boxes \(\$ or \*\) and 2 targets"),
        (["#####", "#@$x#", "#####"], r"unknown 'x' in row 2, column 4; a level is made of '# \.\$\*@\+'"),
        (["#####", "#@\t$.#", "#####"], r"unknown '\\t' in row 2, column 3"),
        (["#####", "#@$. ", "#####"], r"is open at row 2, column 5"),
        (["## ##", "#@$.#", "#####"], r"is open at row 1, column 3"),
        (["# ###", "#@$.#", "#####"], r"is open at row 1, column 2"),
        (["#####", "#@$.#", "# ###"], r"is open at row 3, column 2"),
        (["#####", " @$.#", "#####"], r"is open at row 2, column 1"),
        (["########", "#@$.#$.#", "########"], r"the box or target in row 2, column 6 is behind walls"),
        (["#####", "#@* #", "#####"], r"is solved from the start"),
    ],
)
def test_levels_that_cannot_be_played(rows: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="^puzzle:? " + message):
        parse_level(rows, "puzzle")
    file = tmp_path / "levels.txt"
    file.write_text("\n".join(["; good", "#####", "#@$.#", "#####", "", "; bad one", *rows]))
    with pytest.raises(DataError, match=r"levels\.txt, level bad one:? " + message):
        read_levels(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"own\.txt has no level; each starts with a line '; name'"),
        (b"\n  \n", r"own\.txt has no level"),
        (b"\n#####\n#@$.#\n#####\n", r"own\.txt, line 2: a level starts with a line '; name', not with '#####'"),
        (b"; a\n#####\n#@$\xff#\n#####\n", "level a: unknown '\ufffd' in row 2, column 4"),
        (b"; a\n; b\n#####\n#@$.#\n#####\n", "level a has 0 players"),
    ],
)
def test_files_that_cannot_be_read(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_levels(str(tmp_path / "own.txt"))


def test_a_folder_or_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.txt"):
        with pytest.raises(DataError, match=re.escape(f"no levels at {str(path)!r}")):
            read_levels(str(path))


def test_windows_line_ends_and_equal_names(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"; 0\r\n#####\r\n#@$.#\r\n#####\r\n\r\n; 0\r\n#####\r\n#.$@#\r\n#####\r\n")
    first, second = read_levels(str(tmp_path / "own.txt"))
    assert level_text(first) == "#####\n#@$.#\n#####"
    assert level_text(second) == "#####\n#.$@#\n#####"
