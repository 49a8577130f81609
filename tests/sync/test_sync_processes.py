"""The scenarios over gloo, with one engine and with two."""

from __future__ import annotations

from tests.sync import scenarios


class TestOneEngine(scenarios.OneEngine):
    pass


class TestTwoEngines(scenarios.TwoEngines):
    pass
