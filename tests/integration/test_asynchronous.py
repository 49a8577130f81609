"""An asynchronous training of real processes: in time, in flight, and stopped and resumed without losing a task."""

from __future__ import annotations

import collections
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.learner.checkpoint import latest
from npu_vlrl.network.interrupt import SAME_S, CtrlC
from npu_vlrl.training.build import check_asynchronous
from tests.support.program import program
from tests.support.ranks import PATIENCE_S, Process, finish, fork, log, said
from tests.support.runs import lines, write_config

STEPS, GROUPS = 12, 2
TASKS = STEPS * GROUPS
"""One epoch."""
STALENESS = 2
EVERY = 5
"""Steps between evaluations."""

PATIENT = """
import time
from npu_vlrl.network.interrupt import CtrlC

with CtrlC().caught():
    print("ready", flush=True)
    time.sleep(100)
"""


def command(folder: Path, *words: str) -> list[str]:
    """A training on an epoch of records."""
    rows = [
        {
            "data_source": "made",
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "reward_model": {"ground_truth": "up"},
            "extra_info": {"id": str(i)},
        }
        for i in range(TASKS)
    ]
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "data.train.generator": None,
        "data.train.path": str(file),
        "train.steps": STEPS,
        "warm_start.steps": 0,
        "optim.lr": 1e-2,
        "algorithm.max_logprob_gap": 1e-3,
        "algorithm.correction": "tis",
        "workflow.turn_tokens": 60,
        "workflow.context_tokens": 400,
    }
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = str(write_config(folder))
    return ["-m", "npu_vlrl", "train", "--config", config, "--run-dir", str(folder / "run"), *given, *words]


def wait_for_steps(folder: Path, steps: int, processes: Sequence[Process]) -> None:
    file, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while not file.is_file() or file.read_text().count('"grad_norm"') < steps:
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), said(folder, len(processes))
        time.sleep(0.01)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run, "metrics.jsonl") if "grad_norm" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that Ctrl-C ended after some steps, and that was resumed."""
    folder = tmp_path_factory.mktemp("asynchronous")
    words = command(folder, f"train.staleness={STALENESS}", f"evaluation.every={EVERY}")
    processes = fork(2, words, folder)
    try:
        wait_for_steps(folder, 3, processes)
        for process in processes:
            process.send_signal(signal.SIGINT)
        processes[0].send_signal(signal.SIGINT)  # as a launcher passes it on
        assert finish(processes) == [130, 0], said(folder, 2)
    finally:
        finish(processes)
    output = log(folder, 0).read_text()
    assert "npu-vlrl: ending after the step in hand; Ctrl-C again ends at once" in output
    done = len(steps_of(folder / "run"))
    assert 3 <= done < STEPS
    ended = (
        rf"npu-vlrl: ended (after {done} steps|in an evaluation), as Ctrl-C asked for; go on with run\.if_exists=resume"
    )
    assert re.search(ended, output)
    newest = latest(folder / "run" / "checkpoints")
    assert newest is not None and newest.name.endswith(f"{done}")
    assert finish(fork(2, [*words, "run.if_exists=resume"], folder)) == [0, 0], said(folder, 2)
    assert f"after {done} steps" in log(folder, 0).read_text()
    return folder / "run"


def test_an_epoch_is_trained_once_each_although_the_run_was_ended_and_resumed(trained: Path) -> None:
    played = collections.Counter(line["task"] for line in trained_on(trained))
    assert len(steps_of(trained)) == STEPS
    assert len(played) == TASKS and set(played.values()) == {2}, "each with both members of its group"


def test_nothing_is_older_than_it_may_be_and_something_is_old(trained: Path) -> None:
    steps = steps_of(trained)
    assert all(step["async/staleness"] <= step["async/staleness_max"] <= STALENESS for step in steps)
    assert max(step["async/staleness_max"] for step in steps) >= 1
    for line in trained_on(trained):
        for versions in versions_of(line):
            assert versions == sorted(versions)
            assert line["step"] - STALENESS <= versions[0] <= versions[-1] <= line["step"]


def test_weights_changed_in_the_middle_of_turns(trained: Path) -> None:
    mixed = [v for line in trained_on(trained) for v in versions_of(line) if len(set(v)) > 1]
    assert mixed
    assert max(step["async/interrupted_tokens"] for step in steps_of(trained)) > 0


def test_the_learner_agrees_with_the_engine_where_the_weights_are_its_own(trained: Path) -> None:
    """A gap above 1e-3 would have ended the run; tokens of earlier weights are further away than that."""
    steps = steps_of(trained)
    assert all(("logprob_gap" in step) is (step["logprob_gap_tokens"] > 0) for step in steps)
    assert all(step.get("logprob_gap", 0) < 1e-3 for step in steps)
    assert all(0 < step["probe_gap"] < 1e-3 and step["probe_tokens"] >= 16 for step in steps)
    assert max(step["gap"] for step in steps) > 1e-3
    assert all(math.isfinite(step["correction_weight"]) for step in steps)


def test_evaluations_in_between_are_of_the_weights_of_their_step(trained: Path) -> None:
    """Episodes of the training wait meanwhile, or are played by the same weights."""
    steps = [line["step"] for line in lines(trained, "metrics.jsonl") if "eval/all/accuracy" in line]
    assert steps == [0, *range(EVERY, STEPS, EVERY), STEPS]
    played = [line for line in lines(trained, "trajectories.jsonl") if line["group"].startswith("evaluation")]
    assert {line["step"] for line in played} == set(range(EVERY, STEPS, EVERY))
    for line in played:
        assert {version for versions in versions_of(line) for version in versions} == {line["step"]}


def trained_on(run: Path) -> list[dict[str, Any]]:
    """Episodes of the steps, without those of evaluations."""
    return [line for line in lines(run, "trajectories.jsonl") if line["group"].startswith("task")]


def versions_of(line: dict[str, Any]) -> list[list[int]]:
    return [turn["action"]["weight_versions"] for turn in line["turns"]]


def test_two_learners_with_a_part_each(tmp_path: Path) -> None:
    words = command(tmp_path, "train.staleness=1", "train.learners=2", "train.shard=true", "train.steps=4")
    assert finish(fork(3, words, tmp_path)) == [0, 0, 0], said(tmp_path, 3)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 4 and max(step["async/staleness_max"] for step in steps) == 1
    assert all(step.get("logprob_gap", 0) < 1e-3 and 0 < step["probe_gap"] < 1e-3 for step in steps)
    played = collections.Counter(line["task"] for line in trained_on(tmp_path / "run"))
    assert len(played) == 4 * GROUPS and set(played.values()) == {2}


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_synchronous_run_ends_after_the_step_in_hand_too(tmp_path: Path, number: signal.Signals) -> None:
    words = command(tmp_path, "train.steps=1000", "workflow.turn_tokens=8")
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # as a library has it that was imported before
    try:
        (process,) = fork(1, words, tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    wait_for_steps(tmp_path, 2, [process])
    process.send_signal(number)
    assert finish([process]) == [130], said(tmp_path, 1)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    again = "Ctrl-C" if number == signal.SIGHUP else f"{name} again"
    output = said(tmp_path, 1)
    assert f"ending after the step in hand; {again} ends at once" in output and f"as {name} asked for" in output
    steps, newest = steps_of(tmp_path / "run"), latest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name.endswith(str(len(steps))) and len(steps) >= 2
    assert "async/staleness" not in steps[0]


def test_a_second_ctrl_c_ends_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", PATIENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert b"ending after the step in hand" in process.stderr.readline() + process.stderr.readline()
    time.sleep(SAME_S + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish([process]) == [-signal.SIGINT]


def test_ctrl_c_is_asked_for_once_and_then_as_before() -> None:
    before, ctrl_c = signal.getsignal(signal.SIGINT), CtrlC()
    with ctrl_c.caught():
        assert not ctrl_c.asked
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # at once: the same one
        assert ctrl_c.asked
    assert signal.getsignal(signal.SIGINT) is before

    def elsewhere() -> None:
        with CtrlC().caught():
            assert signal.getsignal(signal.SIGINT) is before

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()


# --- what is refused -------------------------------------------------------------------------------------------------


def small(folder: Path, **settings: Any) -> Config:
    given = {"train.staleness": 1, **{key.replace("__", "."): value for key, value in settings.items()}}
    return load_config(write_config(folder), [f"{key}={json.dumps(value)}" for key, value in given.items()])


def test_one_process_cannot_overlap(tmp_path: Path) -> None:
    words = ["--config", write_config(tmp_path), "--run-dir", tmp_path / "run", "train.staleness=1"]
    message = program("train", *words).refused()
    assert message.startswith("train.staleness=1 samples while the learner learns, which takes processes that only")


@pytest.mark.parametrize(
    "settings, accepted",
    [
        ({"train__learners": "all"}, False),
        ({}, True),
        ({"algorithm__loss": "cispo"}, True),
        ({"algorithm__loss": "reinforce"}, False),
        ({"algorithm__loss": "reinforce", "algorithm__correction": "tis"}, True),
        ({"algorithm__loss_mask": False}, False),
        ({"train__staleness": 2}, False),
        ({"train__staleness": 2, "algorithm__correction": "icepop"}, True),
        ({"train__staleness": 2, "algorithm__loss": "decoupled_ppo"}, True),
        ({"train__staleness": 0, "train__learners": "all", "algorithm__loss": "reinforce"}, True),
    ],
)
def test_what_may_be_asynchronous(
    settings: dict[str, Any], accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, **settings)
    monkeypatch.setenv("WORLD_SIZE", "2")
    if accepted:
        check_asynchronous(config)
        return
    with pytest.raises(ConfigError, match="train.staleness=[12] (samples|trains)"):
        check_asynchronous(config)
