"""A run that is stopped anywhere and resumed is the run that was never stopped: same numbers, tokens and weights."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from transformers import Qwen2Tokenizer

from npu_vlrl.config import Config, ConfigError
from npu_vlrl.learner import checkpoint
from npu_vlrl.learner.checkpoint import CheckpointError, latest
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.network.interrupt import CtrlC, Interrupted
from npu_vlrl.train_loop import train
from npu_vlrl.training.evaluation import Evaluation
from tests.support.checkpoints import as_of_old, seal
from tests.support.learning import plain_model
from tests.support.ranks import PATIENCE_S
from tests.support.runs import lines, metrics, same_weights, small_config

torch.set_num_threads(1)

Runs = dict[str, Path]


class Stopped(BaseException):
    """As Ctrl-C does, it passes every `except Exception`."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one go."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    train(small_config(folder))
    return folder


def resume(folder: Path, **changes: Any) -> list[str]:
    """Goes on, and returns the updates made: `supervise` and `step`."""
    made: list[str] = []

    def counted(name: str) -> Any:
        original = getattr(Learner, name)

        def call(self: Learner, *arguments: Any) -> Any:
            made.append(name)
            return original(self, *arguments)

        return mock.patch.object(Learner, name, call)

    with counted("supervise"), counted("step"):
        train(small_config(folder, run__if_exists="resume", **changes))
    return made


def counters(folder: Path) -> list[list[float]]:
    """What was counted since the run began, after each step."""
    names = ("engine/tokens_requested", "engine/tokens_prefilled", "engine/tokens_decoded", "learner/tokens_referenced")
    names += ("learner/tokens_computed", "images_referenced", "images_encoded", "skipped_records")
    return [[line[name] for name in names] for line in lines(folder, "metrics.jsonl") if "grad_norm" in line]


def assert_same_run(folder: Path, unbroken: Path) -> None:
    assert metrics(folder) == metrics(unbroken)
    assert counters(folder) == counters(unbroken)
    assert lines(folder, "trajectories.jsonl") == lines(unbroken, "trajectories.jsonl")
    assert same_weights(folder, unbroken)
    first, second = (json.loads((run / "summary.json").read_text()) for run in (folder, unbroken))
    assert [first[key] for key in ("baseline", "final", "steps")] == [second[k] for k in ("baseline", "final", "steps")]
    images = [sorted(file.name for file in (run / "images").iterdir()) for run in (folder, unbroken)]
    assert images[0] == images[1]


def stop_in(config: Config, owner: Any, name: str, call: int) -> None:
    """Trains until the `call`-th call of a method, which is never entered."""
    original, calls = getattr(owner, name), []

    def stop(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise Stopped
        return original(*arguments, **options)

    with mock.patch.object(owner, name, stop), pytest.raises(Stopped):
        train(config)


# --- the run that all others are compared with -----------------------------------------------------------------------


def test_the_unbroken_run_is_worth_comparing_with(unbroken: Path, tmp_path: Path) -> None:
    trained = [line for line in metrics(unbroken) if "grad_norm" in line]
    assert [line["step"] for line in trained] == [0, 1, 2, 3]
    assert all(line["grad_norm"] > 1e-3 and line["reward_std"] > 0 for line in trained)
    assert all(
        a < b for former, later in pairwise(counters(unbroken)) for a, b in zip(former[:-1], later, strict=False)
    )
    assert trained[0]["kl"] < 1e-9 and min(line["kl"] for line in trained[1:]) > 1e-3
    other = tmp_path / "run"
    train(small_config(other, train__seed=1))
    with pytest.raises(AssertionError):  # the comparison sees another seed
        assert_same_run(other, unbroken)
    assert not same_weights(other, unbroken)


# --- stopped anywhere ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 4])
def test_stopped_in_a_step(unbroken: Path, tmp_path: Path, call: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The step before the stop is in the last checkpoint; what was recorded of the broken step is not doubled."""
    folder = tmp_path / "run"
    stop_in(small_config(folder), Learner, "step", call)
    assert resume(folder) == ["step"] * (5 - call)
    assert ("holds no checkpoint: the training begins anew" in capsys.readouterr().out) is (call == 1)
    assert_same_run(folder, unbroken)


def test_stopped_after_a_step_was_recorded_and_before_its_checkpoint(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop_in(small_config(folder), checkpoint, "save", 3)
    assert [line["step"] for line in metrics(folder)] == [0, 0, 1, 2]
    assert resume(folder) == ["step"] * 2  # steps 3 and 4 again
    assert_same_run(folder, unbroken)


def test_stopped_twice_and_in_the_middle_of_a_checkpoint(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop_in(small_config(folder), checkpoint, "save_file", 5)  # the second file of the second checkpoint
    assert latest(folder / "checkpoints") == folder / "checkpoints" / "step-00000001"
    stop_in(small_config(folder, run__if_exists="resume"), Learner, "step", 2)
    assert resume(folder) == ["step"] * 2
    assert_same_run(folder, unbroken)
    assert not list((folder / "checkpoints").glob(".*"))


def test_stopped_in_the_final_evaluation(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop_in(small_config(folder), checkpoint, "save", 4)
    assert resume(folder) == ["step"]
    assert_same_run(folder, unbroken)


def test_a_broken_final_evaluation_costs_no_step(unbroken: Path, tmp_path: Path) -> None:
    """Also where no checkpoint was asked for."""
    folder = tmp_path / "run"
    once = {"run__checkpoint_every": 0}
    stop_in(small_config(folder, **once), Evaluation, "play", 2)
    assert resume(folder, **once) == []
    assert_same_run(folder, unbroken)


@pytest.mark.parametrize(
    ("asks", "where", "updates"),
    [
        (1, "the warm start", ["supervise"] * 2 + ["step"] * 4),
        (2, "the warm start", ["supervise"] * 2 + ["step"] * 4),
        (3, "the baseline evaluation", ["step"] * 4),
        (8, "the final evaluation", []),
    ],
)
def test_ctrl_c_where_no_step_is_in_hand(
    unbroken: Path, tmp_path: Path, asks: int, where: str, updates: list[str]
) -> None:
    """Asked for before each of two supervised steps, before the baseline, after each of four steps, before the end."""
    folder, asked = tmp_path / "run", iter(range(1, 9))
    pressed = mock.PropertyMock(side_effect=lambda: next(asked) == asks)
    with mock.patch.object(CtrlC, "asked", pressed), pytest.raises(Interrupted, match=f"^ended in {where}, as Ctrl-C"):
        train(small_config(folder))
    assert resume(folder) == updates
    assert_same_run(folder, unbroken)


def test_ctrl_c_in_an_evaluation_on_the_way_loses_no_step(tmp_path: Path) -> None:
    """Asked for before the baseline, after the first two of three steps, and before the evaluation between them."""
    whole, folder, asked = tmp_path / "whole", tmp_path / "run", iter([False, False, False, True])
    settings: dict[str, Any] = {"evaluation__every": 2, "train__steps": 3, "warm_start__steps": 0}
    settings["run__checkpoint_every"] = 0
    train(small_config(whole, **settings))
    pressed = mock.PropertyMock(side_effect=lambda: next(asked))
    with mock.patch.object(CtrlC, "asked", pressed), pytest.raises(Interrupted, match="^ended in an evaluation, as"):
        train(small_config(folder, **settings))
    assert resume(folder, **settings) == ["step"]
    assert_same_run(folder, whole)


@pytest.mark.parametrize(("call", "name"), [(1, "weights"), (5, "optimizer")])
def test_a_full_disk_is_told_by_the_name_of_the_file(tmp_path: Path, call: int, name: str) -> None:
    folder, calls, original = tmp_path / "run", [], checkpoint.save_file

    def save_file(tensors: Any, file: Path, *rest: Any) -> None:
        calls.append(file)
        if len(calls) == call:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        original(tensors, file, *rest)

    named = rf"No space left on device: '{folder}/\S*/{name}\.safetensors'"
    with mock.patch.object(checkpoint, "save_file", save_file), pytest.raises(OSError, match=named):
        train(small_config(folder, train__steps=2, warm_start__steps=0))


@pytest.mark.parametrize("call", [2, 3])
def test_evaluations_on_the_way_are_not_lost(tmp_path: Path, call: int) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    settings = {"evaluation__every": 1, "train__steps": 3}
    train(small_config(whole, **settings))
    stop_in(small_config(folder, **settings), Learner, "step", call)
    resume(folder, **settings)
    assert_same_run(folder, whole)
    assert [line["step"] for line in metrics(whole) if "eval/all/tasks" in line] == [0, 1, 2, 3]


@pytest.mark.parametrize(("method", "call"), [("supervise", 2), ("_apply", 1)])
def test_stopped_in_the_warm_start(unbroken: Path, tmp_path: Path, method: str, call: int) -> None:
    folder = tmp_path / "run"
    stop_in(small_config(folder), Learner, method, call)
    assert not (folder / "warm_start").exists()
    assert resume(folder) == ["supervise"] * 2 + ["step"] * 4
    assert_same_run(folder, unbroken)


def test_stopped_while_the_warm_start_is_written(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop_in(small_config(folder), Qwen2Tokenizer, "save_pretrained", 1)
    assert not (folder / "warm_start").exists()
    assert resume(folder) == ["supervise"] * 2 + ["step"] * 4
    assert_same_run(folder, unbroken)


def in_child(run: Callable[[], object]) -> int:
    """The process id of a fork that does `run`."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(3)
    return child


@pytest.mark.parametrize("seen", ["warm_start", "checkpoints/step-00000001", "checkpoints/.step-00000002.partial"])
def test_killed_from_outside(unbroken: Path, tmp_path: Path, seen: str) -> None:
    """SIGKILL, at whatever the process does just after a file of it is seen."""
    folder = tmp_path / "run"
    child = in_child(lambda: train(small_config(folder)))
    limit = time.monotonic() + PATIENCE_S
    while not (folder / seen).exists() and not (folder / "summary.json").exists() and time.monotonic() < limit:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (folder / "summary.json").exists()
    resume(folder)
    assert_same_run(folder, unbroken)


# --- other settings --------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "frozen tower": {"model__freeze_vision": True, "rollout__groups": 3},
    "adapter": {"model__lora": {"rank": 2, "alpha": 4}, "warm_start__steps": 0},
    "mini-batches": {
        "algorithm__updates": 2,
        "algorithm__epochs": 2,
        "optim__schedule": "cosine",
        "workflow__export_style": "individual",
        "optim__micro_batch_tokens": 80,
    },
    "dynamic sampling": {"algorithm__preset": "dapo", "warm_start__steps": 0, "rollout__temperature": 0.8},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path: Path, name: str) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train(small_config(whole, train__steps=3, **VARIANTS[name]))
    stop_in(small_config(folder, train__steps=3, **VARIANTS[name]), Learner, "step", 3)
    assert resume(folder, train__steps=3, **VARIANTS[name]) == ["step"]
    assert_same_run(folder, whole)
    assert all(line["grad_norm"] > 0 for line in metrics(whole) if "grad_norm" in line)


def records(folder: Path, n: int = 7) -> Path:
    file = folder / "train.jsonl"
    rows = (
        {
            "prompt": [{"role": "user", "content": f"Say {i}"}],
            "data_source": "numbers",
            "reward_model": {"ground_truth": str(i)},
        }
        for i in range(n)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


TEXT = {"model__path": "tiny:qwen3", "warm_start__steps": 0, "workflow__tools": [], "train__steps": 3}


def test_a_text_model_on_records(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    source = {"path": str(records(tmp_path)), "generator": None}
    train(small_config(whole, data__train=source, **TEXT))
    stop_in(small_config(folder, data__train=source, **TEXT), Learner, "step", 3)
    assert resume(folder, data__train=source, **TEXT) == ["step"]
    assert_same_run(folder, whole)
    drawn = [line["task"] for line in lines(folder, "trajectories.jsonl") if line["group"].startswith("step")][::2]
    assert len(set(drawn[:6])) == 6  # one epoch has seven tasks: none came twice before all came once

    records(tmp_path, 8)  # the file is another one now
    with pytest.raises(ConfigError, match=r"^data\.train: train\.jsonl changed since the run in .* began \(20"):
        resume(folder, data__train=source, **TEXT)
    (folder / "inputs.json").unlink()  # as earlier releases left it; the checkpoint knows something, too
    with pytest.raises(CheckpointError, match="step-00000003: the saved position belongs to other data"):
        resume(folder, data__train=source, **TEXT)


# --- what may differ -------------------------------------------------------------------------------------------------


def test_more_steps_than_at_first(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(small_config(folder, train__steps=2))
    assert resume(folder, train__steps=4, run__keep_checkpoints=1, run__log_every=2) == ["step"] * 2
    assert_same_run(folder, unbroken)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000004"]


def test_what_cures_a_lack_of_memory_changes_no_number_by_much(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(small_config(folder, train__steps=2))
    changes: dict[str, Any] = {
        "optim__micro_batch_tokens": 100,
        "optim__logprob_chunk": 5,
        "model__gradient_checkpointing": True,
        "rollout__cache_mib": 1,
        "rollout__feature_cache_mib": 0,
        "rollout__max_failed_share": 0.1,
        "reward__workers": 2,
        "reward__deadline_s": 30.0,
        "algorithm__max_logprob_gap": 0.5,
        "data__train__max_skip_share": 0.5,
    }
    assert resume(folder, **changes) == ["step"] * 2
    trained = [[line for line in metrics(run) if "grad_norm" in line] for run in (folder, unbroken)]
    changed = [[line.pop("update/micro_batches") for line in lines] for lines in trained]
    assert changed[0][:2] == changed[1][:2] and changed[0][2] > changed[1][2]  # they were followed
    for key in ("reward", "kl", "grad_norm", "entropy"):
        assert [line[key] for line in trained[0]] == pytest.approx([line[key] for line in trained[1]], rel=1e-3), key


def test_a_longer_run_takes_up_the_schedule_of_its_new_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 learning rates of a line over 2 and then over 4 steps: the second half is that of four steps from the start."""
    rates = {}
    for name, lengths in {"grown": (2, 4), "whole": (4,)}.items():
        for steps in lengths:
            settings = {"optim__schedule": "linear", "optim__warmup_steps": 0, "warm_start__steps": 0}
            train(small_config(tmp_path / name, train__steps=steps, run__if_exists="resume", **settings))
        rates[name] = [line["lr"] for line in metrics(tmp_path / name) if "lr" in line]
    assert rates["whole"] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert rates["grown"] == pytest.approx([1e-2, 0.5e-2, 0.5e-2, 0.25e-2])
    told = (
        "train.steps was 2 and is 4: the linear schedule ends there now, so the learning rate goes on with 0.005 where"
    )
    assert (
        capsys.readouterr().out.count(f"{told} it would have been 0; for the old curve resume with train.steps=2") == 1
    )


@pytest.fixture
def finished(unbroken: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return shutil.copytree(unbroken, tmp_path / "run")


def copied_config(folder: Path, **changes: Any) -> Config:
    """The configuration under which the copy was made, but for its place."""
    rule = (folder / "config.yaml").read_text().split("rule: ")[1].split("\n")[0]
    return small_config(folder, reward__rule=rule, run__if_exists="resume", **changes)


def test_a_finished_run_has_nothing_left_to_do(finished: Path, unbroken: Path) -> None:
    train(copied_config(finished))
    assert_same_run(finished, unbroken)


def test_a_resumed_run_took_the_time_of_both_processes(finished: Path) -> None:
    state = finished / "checkpoints" / "step-00000004" / "state.json"
    before = json.loads(state.read_text())
    assert 0 < before["seconds"] <= json.loads((finished / "summary.json").read_text())["train_seconds"] + 0.1
    state.write_text(json.dumps(before | {"seconds": 5000.0}))
    seal(state.parent)
    assert train(copied_config(finished))["train_seconds"] > 5000
    state.write_text(json.dumps({key: value for key, value in before.items() if key != "seconds"}))
    seal(state.parent)
    assert train(copied_config(finished))["train_seconds"] < 5000  # a checkpoint of before it was noted


def test_weights_may_be_read_by_whom_other_files_may_be(unbroken: Path) -> None:
    modes = {file.stat().st_mode for file in unbroken.rglob("*.safetensors")}
    assert modes == {(unbroken / "summary.json").stat().st_mode}


def test_without_leave_to_resume_nothing_is_touched(finished: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    with pytest.raises(ConfigError, match="holds a run; continue it with run.if_exists=resume"):
        train(copied_config(finished).model_copy(update={"run": small_config(finished).run}))
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*")} == before


def test_another_configuration_is_refused_by_name(finished: Path) -> None:
    changed = {"optim__lr": 0.5, "workflow__max_turns": 1, "train__seed": 9, "algorithm__preset": "dapo"}
    with pytest.raises(ConfigError) as caught:
        train(copied_config(finished, **changed))
    for key in ("optim.lr", "workflow.max_turns", "train.seed", "algorithm.preset"):
        assert key in str(caught.value)
    assert "train.steps" not in str(caught.value) and "cannot resume" in str(caught.value)


def test_fewer_steps_than_done_are_refused(finished: Path, unbroken: Path) -> None:
    with pytest.raises(ConfigError, match="train.steps: .*step-00000004 has done 4 steps already, more than 3"):
        train(copied_config(finished, train__steps=3))
    assert latest(finished / "checkpoints") == finished / "checkpoints" / "step-00000004"
    assert metrics(finished) == metrics(unbroken)


def test_a_damaged_checkpoint_is_named_and_an_older_one_serves(finished: Path, unbroken: Path) -> None:
    newest = finished / "checkpoints" / "step-00000004"
    (newest / "optimizer.safetensors").write_bytes(b"x" * 100)
    damaged = r"step-00000004/optimizer\.safetensors is damaged: .*, or remove \S* to go on from step-00000003$"
    with pytest.raises(CheckpointError, match=damaged):
        train(copied_config(finished))
    shutil.rmtree(newest)
    train(copied_config(finished))
    assert_same_run(finished, unbroken)


def test_a_run_of_an_earlier_release_goes_on_and_says_what_is_not_checked(
    finished: Path, unbroken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished / "checkpoints" / "step-00000004")
    as_of_old(finished / "checkpoints" / "step-00000003")
    (finished / "inputs.json").unlink()
    train(copied_config(finished))
    assert metrics(finished) == metrics(unbroken) and same_weights(finished, unbroken)
    told = capsys.readouterr().out
    assert "was begun by an earlier release and has no inputs.json" in told and "has no checksums" in told
    train(copied_config(finished))
    told = capsys.readouterr().out
    assert "inputs.json" not in told and "has no checksums" not in told


def test_the_weights_at_the_end_are_those_of_the_last_checkpoint(unbroken: Path) -> None:
    saved = checkpoint.load(unbroken / "checkpoints" / "step-00000004").weights
    exported = plain_model(unbroken / "export").state_dict()
    assert len(saved) > 50 and all(torch.equal(tensor, exported[name]) for name, tensor in saved.items())
