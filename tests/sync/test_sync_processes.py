"""The scenarios over gloo, with one engine and with two."""

from __future__ import annotations

from tests.sync.scenarios import MoreScenarios, Scenarios


class TestOneEngine(MoreScenarios):
    pass


class TestTwoEngines(Scenarios):
    size = 3
