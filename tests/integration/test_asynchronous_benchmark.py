"""The benchmark of asynchronous training: real schedule and rounds, nothing trained twice, and it is in time."""

from __future__ import annotations

import pytest

from benchmarks.asynchronous import compare, parse

FAST = ["--steps", "3", "--groups", "2", "--members", "2", "--seeds", "1"]
CLOCKS = ["--learn", "0.02", "--token-ms", "0.2", "--tokens", "20", "--judge", "0.01"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, float]]:
    return compare(parse([*FAST, *CLOCKS]))


def test_a_row_for_each_staleness(rows: list[dict[str, float]]) -> None:
    assert [row["eta"] for row in rows] == [0, 1, 2]
    assert [row["staleness"] <= row["eta"] for row in rows] == [True] * 3
    assert rows[0]["interrupted_turns_a_step"] == 0 and rows[2]["staleness"] > 0
    for row in rows:
        assert row["speed_up"] == rows[0]["step_s"] / row["step_s"] and 0 < row["waited_share"] < 1
