"""The comparison of ways to give credit: one step of each, what it counts, and what it refuses to count."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import credit
from tests.support.learning import tiny_folder
from tests.support.program import program

ROOT = Path(__file__).parents[2]
SMALL = (
    "train.steps=1",
    "warm_start.steps=2",
    "warm_start.batch=4",
    "rollout.groups=2",
    "rollout.group_size=2",
    "workflow.max_turns=3",
    "evaluation.tasks=3",
)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs of the benchmark are made here, which saves the start of a process each; returns their commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "npu_vlrl", "train"]
        commands.append(command)
        done = program(*command[3:])
        return subprocess.CompletedProcess(command, done.code, done.out + done.err)

    monkeypatch.setattr(credit.subprocess, "run", run)
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    return commands


def test_every_preset_trains_from_the_same_warm_start(tmp_path: Path, in_this_process: list[list[str]]) -> None:
    overrides = [*SMALL, f"model.path={tiny_folder()}"]
    runs = credit.compare(credit.CONFIG, credit.PRESETS, range(1), 1, tmp_path, overrides)
    assert [run["preset"] for run in runs] == [None, "trico", "aico", "rico_gae", "rico_grpo", "grpo"]
    assert [len(run["solved"]) for run in runs] == [0, 1, 1, 1, 1, 1]
    assert len({json.dumps(run["before"]) for run in runs}) == 1
    assert len({run["solved"][0] for run in runs[1:]}) == 1, "the first rollouts are of the same policy"
    assert {command[-1] for command in in_this_process} == {"train.threads=1"}
    starts = {arg for command in in_this_process[1:] for arg in command if arg.startswith("model.path")}
    assert starts == {f"model.path={tiny_folder()}", f"model.path={tmp_path / 'warm-0' / 'warm_start'}"}
    weights = [(tmp_path / f"{preset}-0" / "export" / "model.safetensors").read_bytes() for preset in credit.PRESETS]
    warm = (tmp_path / "warm-0" / "export" / "model.safetensors").read_bytes()
    assert all(len(trained) == len(warm) for trained in weights)
    for preset in ("trico", "rico_gae"):  # KL in the reward and a critic: there is something to learn without success
        assert weights[credit.PRESETS.index(preset)] != warm, preset
    rows = credit.table(runs).splitlines()
    assert [re.split(r"\W+", row)[1] for row in rows] == ["preset", "", *credit.PRESETS]


def a_run(preset: str | None, seed: int, before: float, after: float, solved: list[float]) -> dict[str, Any]:
    kinds = {"before": before, "after": after}
    numbers = {when: {"success": share, "reward": 2 * share, "turns": 8 - share} for when, share in kinds.items()}
    return {"preset": preset, "seed": seed, **numbers, "solved": solved, "seconds": 10.0 + seed}


def test_the_table_has_means_and_standard_deviations() -> None:
    runs = [a_run(None, 0, 0.1, 0.1, []), a_run("grpo", 0, 0.1, 0.9, [0.2, 0.6])]
    assert credit.table(runs).splitlines()[2:] == ["| `grpo` | 10 % | 90 % | 40 % | 1.80 | 7.1 | 10 |"]
    # 0.2, 0.4, 0.6: mean 0.4, and sqrt((0.04 + 0 + 0.04) / 2) = 0.2
    runs = [a_run("aico", seed, 0.0, after, [after, 0.0]) for seed, after in enumerate((0.2, 0.4, 0.6))]
    assert credit.table(runs).splitlines()[2:] == [
        "| `aico` | 0 % ± 0 | 40 % ± 20 | 20 % ± 10 | 0.80 ± 0.40 | 7.6 ± 0.2 | 11 |"
    ]


def test_runs_that_begin_differently_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(before_of_grpo: float) -> list[dict[str, Any]]:
        def train(config: Path, folder: Path, overrides: Any) -> dict[str, Any]:
            run = a_run(None, 0, before_of_grpo if folder.name == "grpo-0" else 0.5, 0.5, [0.5])
            return {key: run[key] for key in ("before", "after", "solved", "seconds")}

        monkeypatch.setattr(credit, "train", train)
        return credit.compare(credit.CONFIG, ["aico", "grpo"], [0], 2, tmp_path, [])

    assert [run["preset"] for run in compare(0.5)] == [None, "aico", "grpo"]
    with pytest.raises(AssertionError, match="begin with the same policy"):
        compare(0.25)


def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(RuntimeError, match=r"ended with code 2:\n(?s:.*)did you mean train\.steps"):
        credit.train(credit.CONFIG, tmp_path / "run", ["train.stepz=1"])


def test_a_run_that_skips_updates_is_not_compared(tmp_path: Path, in_this_process: list[list[str]]) -> None:
    credit.train(credit.CONFIG, tmp_path, [*SMALL, f"model.path={tiny_folder()}", "run.if_exists=resume"])
    record = (tmp_path / "metrics.jsonl").read_text()
    assert record.count('"skipped_updates": 0.0') == 1
    (tmp_path / "metrics.jsonl").write_text(record.replace('"skipped_updates": 0.0', '"skipped_updates": 1.0'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(credit.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, ""))
        with pytest.raises(RuntimeError, match="skipped updates that were not finite"):
            credit.train(credit.CONFIG, tmp_path, [])


def test_the_script_prints_the_table_and_writes_every_run(
    tmp_path: Path,
    in_this_process: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [*SMALL, f"model.path={tiny_folder()}"]
    arguments = ["--seeds", "2", "--processes", "1", "--presets", "grpo", "--out", str(tmp_path / "c.json")]
    monkeypatch.setattr(sys, "argv", ["credit.py", *arguments, *overrides])
    credit.main()
    out = capsys.readouterr().out
    assert re.search(r"^\| `grpo` \| \d+ % ± \d+ \| \d+ % ± \d+ \| \d+ % ± \d+ \|", out, re.MULTILINE)
    assert re.search(r"^\d+ s, \d+ s of processor time, for 4 runs, 1 at a time$", out, re.MULTILINE)
    written = json.loads((tmp_path / "c.json").read_text())
    assert [(run["preset"], run["seed"]) for run in written["runs"]] == [(None, 0), (None, 1), ("grpo", 0), ("grpo", 1)]
    assert written["overrides"] == overrides and written["config"] == "frozenlake_tiny.yaml"
    assert written["processor"] and written["cores"] >= 1
