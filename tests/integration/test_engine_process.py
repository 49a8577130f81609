"""A training of several processes is the training of one; and whichever of them ends, the others end and say who."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.program import program
from tests.support.ranks import PATIENCE_S, ROOT, Process, finish, fork, log, said
from tests.support.runs import REPEATS, exported_weights, lines, same_weights, train_alone, write_config

torch.set_num_threads(1)

WORDS = ["algorithm.kl_coef=0.05", "warm_start.steps=2"]

KILLER = """
import os, pathlib, signal

def score(task, text, history, images):
    run, flag = pathlib.Path({run!r}), pathlib.Path({run!r} + ".killed")
    recorded = run / "metrics.jsonl"
    if recorded.exists() and recorded.read_text().count("\\n") > 2 and not flag.exists():
        flag.touch()  # the baseline and two steps are recorded: the third rollout goes on
        os.kill(engine(), signal.SIGKILL)
    return {{"reward": len(text) % 5 / 4, "solved": len(text) % 5 == 4}}

def engine():
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            words = file.read_bytes().split(b"\\0")
        except OSError:
            continue
        if b"RANK=2" in words and b"TEST_RUN=" + {run!r}.encode() in words:
            return int(file.parent.name)
"""
"""The reward of `tests.support.runs`, which once kills engine 2."""


def command(folder: Path, *words: str) -> list[str]:
    return ["-m", "npu_vlrl", "train", "--config", str(write_config(folder)), "--run-dir", str(folder / "run"), *words]


def torchrun(size: int, arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, as a terminal starts it."""
    settings = {"OMP_NUM_THREADS": "1", "NPU_VLRL_PLATFORM": "cpu", "TEST_RUN": str(folder / "run")}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments]
    with log(folder, 0).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def recorded(run: Path) -> list[dict[str, Any]]:
    """Each line of metrics without clocks, memory and what is sent."""
    clocks = {"seconds", "rollout_seconds", "peak_memory_gib", "sync/bytes", "sync/seconds"}
    assert clocks - {"sync/bytes", "sync/seconds"} <= set(REPEATS)
    clocks |= {name for name in REPEATS if name.startswith("update/") or name.endswith("_per_second")}
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines(run, "metrics.jsonl")]


def close(one: list[dict[str, Any]], other: list[dict[str, Any]], tolerance: float) -> bool:
    """Counters of a process that was resumed begin again, and are not compared."""
    counters = ("engine/", "images_", "learner/")
    return len(one) == len(other) and all(
        a.keys() == b.keys()
        and all(math.isclose(a[k], b[k], rel_tol=0, abs_tol=tolerance) for k in a if not k.startswith(counters))
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    return train_alone(tmp_path_factory.mktemp("alone"), *WORDS)


def test_learner_and_engine_process_repeat_the_run_of_one_process(alone: Path, tmp_path: Path) -> None:
    assert torchrun(2, command(tmp_path, *WORDS), tmp_path).wait(PATIENCE_S) == 0, said(tmp_path, 1)
    run = tmp_path / "run"
    assert recorded(run) == recorded(alone)  # counters of the engine and pictures, too
    assert lines(run, "trajectories.jsonl") == lines(alone, "trajectories.jsonl")
    assert same_weights(run, alone)
    steps = [line for line in lines(run, "metrics.jsonl") if "grad_norm" in line]
    assert len(steps) == 4 and all(step["grad_norm"] > 1e-3 for step in steps)
    assert max(abs(step["pg_loss"]) for step in steps) > 1e-3
    trained = sum(-(-tensor.nbytes // 512) * 512 for tensor in exported_weights(run).values())
    assert [step["sync/bytes"] for step in steps] == [trained] * 4  # each in whole blocks; the head is tied
    assert all(step["sync/seconds"] > 0 for step in steps)
    assert "sampling in engine 1 (rank 1, process " in log(tmp_path, 0).read_text()
    assert not close(recorded(run), [{**line, "pg_loss": 0.0} for line in recorded(alone)], 1e-5)


def test_an_engine_killed_in_a_rollout_ends_the_run_by_name_and_the_run_goes_on(alone: Path, tmp_path: Path) -> None:
    words = command(tmp_path, *WORDS)
    (tmp_path / "reward.py").write_text(KILLER.format(run=str(tmp_path / "run")))
    process = torchrun(3, words, tmp_path)
    assert process.wait(PATIENCE_S) == 1, said(tmp_path, 1)
    output = log(tmp_path, 0).read_text()
    assert (tmp_path / "run.killed").exists() and "npu-vlrl: the run failed: engine 2 (rank 2, process " in output
    assert "run.if_exists=resume" in output
    assert len(recorded(tmp_path / "run")) == 3
    assert finish(fork(2, [*words, "run.if_exists=resume"], tmp_path)) == [0, 0], said(tmp_path, 2)
    assert "after 2 steps" in log(tmp_path, 0).read_text()
    assert close(recorded(tmp_path / "run"), recorded(alone), 1e-5)


# --- each process left to its own fate -------------------------------------------------------------------------------


def test_a_killed_learner_ends_its_engines(tmp_path: Path) -> None:
    learner, engine = fork(2, command(tmp_path, *WORDS, "train.steps=1000"), tmp_path)
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl", [learner, engine])
        learner.send_signal(signal.SIGKILL)
        assert engine.wait(PATIENCE_S) == 1
    finally:
        finish([learner, engine])
    assert "npu-vlrl: the run failed: learner (rank 0, process " in log(tmp_path, 1).read_text()


def test_a_learner_that_fails_tells_its_engines_to_end(tmp_path: Path) -> None:
    """Its own message is the only one."""
    words = command(tmp_path, "model.path=/no/model")
    assert finish(fork(2, words, tmp_path)) == [2, 0], said(tmp_path, 2)
    assert own_words(tmp_path, 0).startswith("npu-vlrl: model.path: /no/model is not a Hugging Face model folder")
    assert own_words(tmp_path, 1) == ""


def own_words(folder: Path, rank: int) -> str:
    """What a process said, without the line in which gloo of torch 2.9 tells of its connections."""
    lines = log(folder, rank).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def test_evaluation_samples_in_the_engine_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command(tmp_path, "evaluation.temperature=1", "evaluation.tasks=3", "evaluation.answers=2")
    words[2] = "eval"
    assert finish(fork(2, words, tmp_path)) == [0, 0], said(tmp_path, 2)
    together = recorded(tmp_path / "run")
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    assert program(*words[2:], "--run-dir", tmp_path / "alone").code == 0
    assert recorded(tmp_path / "alone") == together and together[0]["eval/all/tasks"] == 3
    assert (tmp_path / "run" / "evaluation.json").read_bytes() == (tmp_path / "alone" / "evaluation.json").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_who_ends_torchrun_ends_all(number: signal.Signals, tmp_path: Path) -> None:
    """No process is left, and no copy of the weights, which took the way through files."""
    process = torchrun(2, command(tmp_path, *WORDS, "train.steps=1000", "sync.through=disk"), tmp_path)
    wait_for(tmp_path / "run" / "metrics.jsonl", [process])
    wait_for(tmp_path / "run" / "weights", [process])
    assert len(list(ranks(tmp_path))) >= 2  # and the learner's judge
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends it to all
    else:
        process.send_signal(number)
    try:
        assert process.wait(PATIENCE_S) != 0
        deadline = time.monotonic() + PATIENCE_S
        while any(ranks(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert list(ranks(tmp_path)) == []
    finally:
        finish([process])
    assert (tmp_path / "run" / "config.yaml").is_file() and not (tmp_path / "run" / "weights").exists()


def ranks(folder: Path) -> Iterator[int]:
    """The learner, its judge and its engines, while they live."""
    mark = f"TEST_RUN={folder / 'run'}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = file.read_bytes().split(b"\0")
            is_child = b"-m\0npu_vlrl\0" in (file.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if mark in words and is_child and any(word.startswith(b"RANK=") for word in words):
            yield int(file.parent.name)


def wait_for(file: Path, processes: Sequence[Process]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.1)
