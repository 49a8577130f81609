"""Run folders for tests of the viewer: real episodes of the real workflow, written by the real `RunFolder`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from npu_vlrl.config import Config
from npu_vlrl.report.run_folder import RunFolder
from npu_vlrl.types import EpisodeStatus, Image, Task, Trajectory, Verdict
from tests.support.learning import tiny_folder
from tests.support.ranks import PATIENCE_S
from tests.support.scripted import Verdicts, a_task, an_image, play, workflow

DRAW = '<tool_call>{"name":"draw_line","arguments":{"start":[2,2],"end":[50,50]}}</tool_call>'
WRONG = Verdict(0.25, False, terms={"accuracy": 0.0, "format": 0.25})
RIGHT = Verdict(1.25, True, terms={"accuracy": 1.0, "format": 0.25})
SEEN = an_image(56, seed=4)
HUGE = Image(np.tile(np.arange(224, dtype=np.uint8)[:, None, None], (1, 448, 3)))


def run_folder(folder: Path, with_tokenizer: bool = True) -> RunFolder:
    """An empty run; rewards of an episode add up, 0.5 for each turn that is later."""
    values: dict[str, Any] = {
        "model": {"path": "tiny:qwen2_5_vl" if not with_tokenizer else str(tiny_folder())},
        "data": {"train": {"generator": "photo"}},
        "workflow": {"reward_mode": "sum", "turn_discount": 0.5},
        "run": {"dir": str(folder), "if_exists": "resume"},
    }
    run = RunFolder(Config.model_validate(values))
    run.begin()
    return run


def episode(group: str, member: int, lines: list[str], verdicts: list[Verdict], task: Task | None = None) -> Trajectory:
    settings = {"tools": ("draw_line",), "describe_tools": False, "max_turns": len(lines)}
    with ThreadPoolExecutor(1) as thread:  # what drives a browser keeps an event loop in this one
        flow = workflow(Verdicts(verdicts), **settings)
        done = thread.submit(play, flow, lines, task or a_task(SEEN, "Which way?")).result()
    return dataclasses.replace(done, group=group, member=member)


def record_group(run: RunFolder, step: int, name: str, task: Task | None = None, members: int = 2) -> None:
    """Members that draw a line and then answer, rightly where their number is odd. Tokens count their places."""
    made = []
    for member in range(members):
        last = RIGHT if member % 2 else WRONG
        made.append(episode(name, member, [DRAW, f"<answer>{'up' if member % 2 else 'down'}</answer>"], [last], task))
    advantages = {t.id: [0.5 - (i % 2)] * 2 for i, t in enumerate(made)}
    values = {
        (t.id, k): {
            "advantages": [round((0.5 - (i % 2)) * (place + 1) / 4, 6) for place in range(len(turn.action))],
            "learner_logprobs": [round(-0.01 * (place + 1) - 0.001 * place, 6) for place in range(len(turn.action))],
            "entropy": [round(0.1 * place, 6) for place in range(len(turn.action))],
        }
        for i, t in enumerate(made)
        for k, turn in enumerate(t.turns)
    }
    run.trajectories(step, made, advantages, values)


def failed(group: str) -> Trajectory:
    return Trajectory(a_task(SEEN, "?"), group, 0, (), EpisodeStatus.FAILED, "t/1: the prompt is too long")


def change_records(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes every record again, changed."""
    file = run / "trajectories.jsonl"
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    for record in records:
        change(record)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def as_of_old(record: dict[str, Any]) -> None:
    """A record as runs wrote it before tokens had numbers of the learner."""
    for turn in record["turns"]:
        for key in ("advantages", "learner_logprobs", "entropy"):
            turn["action"].pop(key, None)


def until(page: Any, expression: str) -> None:
    """Waits for JavaScript to be true. What a page's own policy forbids, the driver's waiting for functions needs."""
    deadline = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(20)


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to
