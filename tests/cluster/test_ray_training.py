"""Processes that Ray places train as one process does, start again when one is lost, and end when they are told to."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_engine_process import KILLER, WORDS, close, ranks, recorded, wait_for
from tests.support.ranks import PATIENCE_S
from tests.support.ray_nodes import Driver, two_nodes
from tests.support.runs import REWARD, lines, same_weights, train_alone, write_config

TWO = [*WORDS, "ray.processes=2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    return train_alone(tmp_path_factory.mktemp("alone"), *WORDS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with two_nodes(tmp_path_factory.mktemp("nodes"), {}) as address:
        yield f"ray.address={address}"


def drive(folder: Path, *words: str, command: str = "train", reward: str = REWARD) -> Driver:
    config, run = write_config(folder), folder / "run"
    (folder / "reward.py").write_text(reward)
    return Driver([command, "--config", config, "--run-dir", run, *TWO, *words], folder, {"TEST_RUN": str(run)})


def test_learner_and_engine_on_two_machines_repeat_the_run_of_one_process(
    alone: Path, tmp_path: Path, cluster: str
) -> None:
    driver = drive(tmp_path, cluster, "ray.cpus=2")
    assert driver.wait(PATIENCE_S) == 0, driver.said()
    placed = re.findall(r"^npu-vlrl: \S+ \((127\.0\.0\.\d)\) has rank (\d)$", driver.err.read_text(), re.MULTILINE)
    assert sorted(host for host, _ in placed) == ["127.0.0.2", "127.0.0.3"]
    assert sorted(rank for _, rank in placed) == ["0", "1"]
    assert recorded(tmp_path / "run") == recorded(alone)
    assert lines(tmp_path / "run", "trajectories.jsonl") == lines(alone, "trajectories.jsonl")
    assert same_weights(tmp_path / "run", alone)
    out = driver.out.read_text()
    assert "sampling in engine 1 (rank 1, process " in out and "\nstep 3 (4/4)  reward " in out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []  # no mark is left


def test_a_killed_engine_is_started_again_and_the_run_ends_as_an_unbroken_one(alone: Path, tmp_path: Path) -> None:
    killer = KILLER.format(run=str(tmp_path / "run")).replace("RANK=2", "RANK=1")
    driver = drive(tmp_path, "ray.restarts=1", reward=killer)
    assert driver.wait(PATIENCE_S) == 0, driver.said()
    assert (tmp_path / "run.killed").exists()
    said = driver.err.read_text()
    heard = r"^npu-vlrl: (engine 1 on \S+ \S+ was ended by SIGKILL|learner on \S+ \S+ ended with code 1)$"
    assert len(re.findall(heard, said, re.MULTILINE)) == 1  # whichever came first
    assert "starting all again from the last checkpoint (restart 1 of 1)" in said
    assert said.count(" has rank 0, 1\n") == 2
    assert "after 2 steps" in driver.out.read_text()
    assert close(recorded(tmp_path / "run"), recorded(alone), 1e-5)
    assert same_weights(tmp_path / "run", alone)
    assert not close(recorded(tmp_path / "run"), [{**line, "pg_loss": 0.0} for line in recorded(alone)], 1e-5)


def test_ctrl_c_reaches_the_learner_and_ends_all(tmp_path: Path) -> None:
    """Also where `ray.restarts` would start them again, and in a cluster that was started for this run. The processes
    are in no terminal's group.
    """
    driver = drive(tmp_path, "train.steps=1000", "ray.restarts=3")
    wait_for(tmp_path / "run" / "metrics.jsonl", [driver])
    assert len(list(ranks(tmp_path))) >= 2
    driver.send_signal(signal.SIGINT)
    assert driver.wait(PATIENCE_S) == 130, driver.said()
    deadline = time.monotonic() + PATIENCE_S
    while any(ranks(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(ranks(tmp_path)) == []
    said = driver.err.read_text()
    assert "stopping; Ctrl-C again kills all" in said and "starting all again" not in said
    assert re.search(r"ended after \d+ steps, as Ctrl-C asked for", said)  # the learner's own word


def test_bad_input_is_said_once_and_not_tried_again(tmp_path: Path, cluster: str) -> None:
    driver = drive(tmp_path, cluster, "model.path=/no/model", "ray.restarts=3", "ray.processes=1")
    assert driver.wait(PATIENCE_S) == 2, driver.said()
    said = driver.err.read_text()
    assert said.count("npu-vlrl: model.path: /no/model is not a Hugging Face model folder") == 1
    assert "starting all again" not in said and said.count(" has rank 0\n") == 1


def test_evaluation_plays_where_ray_puts_it(tmp_path: Path, cluster: str) -> None:
    driver = drive(tmp_path, cluster, "ray.processes=1", command="eval")
    assert driver.wait(PATIENCE_S) == 0, driver.said()
    assert [line["eval/all/tasks"] for line in recorded(tmp_path / "run")] == [2]
    assert not (tmp_path / "run" / "checkpoints").exists()
