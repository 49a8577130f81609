"""The Python examples run, and docs/api.md shows them as they are."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import npu_vlrl
from tests.docs.markdown import ROOT, all_blocks

EXAMPLE = ROOT / "examples" / "train_from_python.py"
SMALL = {"train.steps": 2, "warm_start.steps": 2, "warm_start.batch": 4, "evaluation.tasks": 4, "rollout.groups": 2}


def test_the_example_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = npu_vlrl.load_config

    def small(path: str, settings: dict[str, Any]) -> npu_vlrl.Config:
        return load(path, settings | SMALL)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(npu_vlrl, "load_config", small)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "right at the first try: " in capsys.readouterr().out
    folder = tmp_path / "runs" / "arrow_from_python"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("reward" in step for step in steps) == 2
    episode = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    assert re.fullmatch(r"[0-3] \[[\d ]+\] \[[\d ]+\]", episode["turns"][0]["state"]), "the example's own state_key"


def test_the_example_draws_what_it_says() -> None:
    """An arrow's head has more ink than its shaft, and both are symmetrical."""
    game, seen = runpy.run_path(str(EXAMPLE))["game"](), set()
    for seed in range(12):
        game.start(seed)
        ink = game.picture().rgb.max(axis=2) < 150
        halves = {"up": ink[:28], "down": ink[28:], "left": ink[:, :28], "right": ink[:, 28:]}
        amounts = {side: int(half.sum()) for side, half in halves.items()}
        (way,) = game.solution()
        assert [side for side, amount in amounts.items() if amount == max(amounts.values())] == [way]
        assert [game.act(action).solved for action in game.actions] == [action == way for action in game.actions]
        seen.add(way)
    assert seen == set(game.actions)


def test_the_document_shows_the_example() -> None:
    shown = [block.text for block in all_blocks() if block.document == "docs/api.md" and block.language == "python"]
    assert EXAMPLE.read_text() in shown
