"""Processes that all learn and sample repeat the training of one; and whatever becomes of one, the others end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_vlrl.config import load_config
from npu_vlrl.train_loop import train
from tests.integration.test_engine_process import close, command, recorded
from tests.support.ranks import PATIENCE_S, finish, fork, log, said
from tests.support.runs import REPEATS, lines, metrics, same_weights, write_config

torch.set_num_threads(1)

# AdamW moves a weight by the learning rate whatever its gradient is, also where that is rounding alone. Small steps
# keep what comes of that far below what decides a token, on every processor.
WORDS = ["algorithm.kl_coef=0.05", "warm_start.steps=2", "optim.lr=1e-5"]
CRITIC = ["algorithm.preset=turn_ppo", "algorithm.kl_coef=0", "algorithm.updates=2", "workflow.export_style=individual"]
SETTINGS = {
    "grpo": [],
    "critic": CRITIC,
    "one group": ["rollout.groups=1", "rollout.group_size=3"],
    "adapter": ["warm_start.steps=0", "model.lora.rank=4"],
}
ALONE = Callable[[str], Path]


def learners(folder: Path, *words: str) -> list[str]:
    return command(folder, *WORDS, "train.learners=all", *words)


def faulty(fault: str, folder: Path, *words: str) -> list[str]:
    return ["-m", "tests.integration.faulty", fault, *learners(folder, *words)[2:]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> ALONE:
    """The run folder of one process."""

    @cache
    def run(setting: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NPU_VLRL_PLATFORM", "cpu")
            words = [f"run.dir={folder / 'run'}", *WORDS, *SETTINGS[setting]]
            train(load_config(write_config(folder), words))
        return folder / "run"

    return run


def numbers(run: Path) -> list[dict[str, Any]]:
    """Metrics but those of how samples were laid out, which the number of ranks changes."""
    return [{k: v for k, v in line.items() if not k.startswith("update/")} for line in recorded(run)]


def tokens(run: Path) -> list[Any]:
    """What every turn of every episode sampled."""
    return [[turn["action"]["token_ids"] for turn in episode["turns"]] for episode in lines(run, "trajectories.jsonl")]


# --- the training of one ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "setting"),
    [(2, "grpo"), (3, "grpo"), (2, "critic"), (3, "one group"), (2, "adapter")],
)
def test_several_learners_repeat_the_training_of_one(size: int, setting: str, alone: ALONE, tmp_path: Path) -> None:
    assert finish(fork(size, learners(tmp_path, *SETTINGS[setting]), tmp_path)) == [0] * size, said(tmp_path, size)
    run, expected = tmp_path / "run", alone(setting)
    assert close(numbers(run), numbers(expected), 1e-4)
    assert tokens(run) == tokens(expected)
    steps, one = (
        [line for line in lines(folder, "metrics.jsonl") if "grad_norm" in line] for folder in (run, expected)
    )
    assert len(steps) == 4 and all(step["grad_norm"] > 1e-3 for step in steps)
    assert not any("sync/bytes" in step for step in steps)  # nothing is sent
    assert [step["engine/tokens_decoded"] for step in steps] == [step["engine/tokens_decoded"] for step in one]
    assert [step["learner/tokens_referenced"] for step in steps] == [step["learner/tokens_referenced"] for step in one]
    assert all(step["update/micro_batches"] >= size for step in steps)  # each rank has its share, or an idle one
    assert "learning and sampling in engine 1 (rank 1, process " in log(tmp_path, 0).read_text()


def test_two_learners_with_a_part_each_and_an_engine_repeat_the_training_of_one(alone: ALONE, tmp_path: Path) -> None:
    """Then one process goes on from what they wrote, and after it two that learn and sample."""
    divided = ["train.shard=true", "train.offload=true"]
    words = command(tmp_path, *WORDS, "train.learners=2", *divided)
    assert finish(fork(3, words, tmp_path)) == [0, 0, 0], said(tmp_path, 3)
    run, output = tmp_path / "run", log(tmp_path, 0).read_text()
    assert (
        "\nlearning in learner 1 (rank 1, process " in output and "\nsampling in engine 2 (rank 2, process " in output
    )
    assert close(numbers(run), numbers(alone("grpo")), 1e-4) and tokens(run) == tokens(alone("grpo"))
    steps = [line for line in lines(run, "metrics.jsonl") if "grad_norm" in line]
    assert len(steps) == 4 and all(step["sync/bytes"] > 10**5 for step in steps)
    for size, more in ((1, []), (2, ["train.learners=all", "train.shard=true"])):
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        words = command(tmp_path, *WORDS, "run.if_exists=resume", *more)
        assert finish(fork(size, words, tmp_path)) == [0] * size, said(tmp_path, size)
        assert "after 3 steps" in log(tmp_path, 0).read_text()
        assert close(numbers(run), numbers(alone("grpo")), 1e-4) and tokens(run) == tokens(alone("grpo"))


def test_a_tiny_model_trains_with_the_keys_of_eight_npus(tmp_path: Path) -> None:
    """All but vLLM and its sleep, which a CPU's environment lacks and cannot."""
    devices = Path(__file__).parents[2] / "configs/devices/npu_eight.yaml"
    words = ["rollout.engine=inprocess", "rollout.sleep=false", "train.steps=1", "warm_start.steps=0"]
    assert finish(fork(2, command(tmp_path, "--config", str(devices), *words), tmp_path)) == [0, 0], said(tmp_path, 2)
    run = tmp_path / "run"
    config = load_config(run / "config.yaml")
    assert (config.train.learners, config.train.shard, config.rollout.cache_mib) == ("all", True, 8192)
    assert "learning and sampling in engine 1 (rank 1, process " in log(tmp_path, 0).read_text()
    assert [line for line in lines(run, "metrics.jsonl") if "grad_norm" in line]


# --- what is wrong is seen -------------------------------------------------------------------------------------------


def test_gradients_that_are_not_summed_are_noticed_at_the_first_step(tmp_path: Path) -> None:
    codes = finish(fork(2, faulty("not summed", tmp_path), tmp_path))
    assert codes == [1, 0], said(tmp_path, 2)  # rank 1 was told to end
    output = log(tmp_path, 0).read_text()
    assert "npu-vlrl: the run failed: engine 1 (rank 1, process " in output
    assert "holds another " in output and "after 'supervise'" in output


def test_gradients_that_are_not_summed_give_other_numbers(alone: ALONE, tmp_path: Path) -> None:
    words = faulty("not summed, not compared", tmp_path, "algorithm.max_logprob_gap=1000")
    assert finish(fork(2, words, tmp_path)) == [0, 0], said(tmp_path, 2)
    assert not close(numbers(tmp_path / "run"), numbers(alone("grpo")), 1e-4)


def test_learners_that_nobody_samples_for(tmp_path: Path) -> None:
    assert finish(fork(2, command(tmp_path, *WORDS, "train.learners=2"), tmp_path)) == [2, 2], said(tmp_path, 2)
    expected = "npu-vlrl: train.learners=2 leaves none of 2 started processes to sample for the learners; start more"
    assert all(expected in log(tmp_path, rank).read_text() for rank in range(2))


# --- whoever ends ----------------------------------------------------------------------------------------------------


def test_a_learner_killed_in_an_update_ends_the_run_by_name_and_the_run_goes_on(alone: ALONE, tmp_path: Path) -> None:
    processes = fork(3, faulty("killed", tmp_path), tmp_path)
    assert processes[2].wait(PATIENCE_S) == -9, said(tmp_path, 3)
    assert finish(processes)[:2] == [1, 1], said(tmp_path, 3)
    output = log(tmp_path, 0).read_text()
    assert "npu-vlrl: the run failed: engine 2 (rank 2, process " in output and "run.if_exists=resume" in output
    assert "npu-vlrl: the run failed: " in log(tmp_path, 1).read_text()
    assert len(recorded(tmp_path / "run")) == 3  # the baseline and two steps
    words = learners(tmp_path, "run.if_exists=resume")
    assert finish(fork(2, words, tmp_path)) == [0, 0], said(tmp_path, 2)
    assert "after 2 steps" in log(tmp_path, 0).read_text()
    assert close(numbers(tmp_path / "run"), numbers(alone("grpo")), 1e-4)


def test_a_resumed_run_repeats_an_uninterrupted_one_bit_by_bit(tmp_path: Path) -> None:
    runs = []
    for fault in (None, "killed"):
        folder = tmp_path / str(fault)
        folder.mkdir()
        if fault is not None:
            assert finish(fork(2, faulty(fault, folder, *CRITIC[:2]), folder)) == [1, -9], said(folder, 2)
        words = learners(folder, *CRITIC[:2], "run.if_exists=resume")
        assert finish(fork(2, words, folder)) == [0, 0], said(folder, 2)
        runs.append(folder / "run")
    assert metrics(runs[0]) == metrics(runs[1]) and same_weights(*runs)
    assert {"learner/tokens_computed", "seconds"} <= set(REPEATS)


def test_a_learner_that_fails_says_why_to_the_first(tmp_path: Path) -> None:
    codes = finish(fork(3, faulty("out of memory", tmp_path), tmp_path))
    assert codes == [1, 1, 1], said(tmp_path, 3)
    output = log(tmp_path, 0).read_text()
    assert "npu-vlrl: the run failed: engine 2 (rank 2, process " in output
    assert "MemoryError: no room for the gradients" in output


def test_a_learner_that_hangs_is_given_up(tmp_path: Path) -> None:
    processes = fork(2, faulty("hangs", tmp_path, "sync.timeout_s=8"), tmp_path)
    assert processes[0].wait(PATIENCE_S) == 1, said(tmp_path, 2)
    finish(processes)
    assert "npu-vlrl: the run failed: an update of several learners failed: " in log(tmp_path, 0).read_text()


def test_a_disagreement_of_learner_and_engine_ends_all(tmp_path: Path) -> None:
    codes = finish(fork(2, learners(tmp_path, "algorithm.max_logprob_gap=1e-9"), tmp_path))
    assert codes == [1, 0], said(tmp_path, 2)  # rank 1 was told to end
    assert "than algorithm.max_logprob_gap=1e-09" in log(tmp_path, 0).read_text()
