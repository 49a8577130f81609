"""The folder of a run: what it refuses, what it writes, and what a resumed run finds."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.report.run_folder import RunFolder, trajectory_record
from npu_vlrl.types import EpisodeStatus, Image, Trajectory, Verdict
from tests.support.scripted import Verdicts, a_task, an_image, play, workflow

LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
HIDDEN = an_image(56, seed=4)
TASK = a_task(an_image(28), "?", hidden_image=HIDDEN)


def config(folder: Path, **changes: dict[str, Any]) -> Config:
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": {"generator": "arrow"}}}
    changes["run"] = {"dir": str(folder), **changes.get("run", {})}
    return Config.model_validate(values | changes)


def opened(folder: Path, **changes: dict[str, Any]) -> RunFolder:
    run = RunFolder(config(folder, **changes))
    run.begin()
    return run


def episode(*verdicts: Verdict, max_turns: int = 3) -> Trajectory:
    settings: dict[str, Any] = {"tools": ("look",), "describe_tools": False, "max_turns": max_turns}
    return play(workflow(Verdicts(verdicts), **settings), [LOOK, "down\u2028\x1b[2J", "up"], TASK)


def lines(run: RunFolder, name: str) -> list[dict[str, Any]]:
    text = (run.path / name).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text[:-1].split("\n")]


def test_nothing_is_written_before_the_run_begins(tmp_path: Path) -> None:
    run = RunFolder(config(tmp_path / "r"))
    assert not run.resumed and not (tmp_path / "r").exists()
    run.begin()
    assert load_config(tmp_path / "r" / "config.yaml") == config(tmp_path / "r")
    assert run.checkpoints == tmp_path / "r" / "checkpoints"


def test_folders_that_are_in_the_way(tmp_path: Path) -> None:
    opened(tmp_path / "r")
    with pytest.raises(ConfigError, match=r"r holds a run; continue it with run\.if_exists=resume or choose another"):
        RunFolder(config(tmp_path / "r"))
    (tmp_path / "other").mkdir()
    RunFolder(config(tmp_path / "other"))  # an empty folder is fine
    (tmp_path / "other" / "model").mkdir()
    RunFolder(config(tmp_path / "other"))  # and so is a model that a refused start has left
    (tmp_path / "other" / "thesis.tex").touch()
    for taken in (tmp_path / "other", tmp_path / "other" / "thesis.tex"):
        with pytest.raises(ConfigError, match="exists and is not a run folder"):
            RunFolder(config(taken))
    with pytest.raises(ConfigError, match=r"below cannot be made, since .*thesis\.tex is not writable"):
        RunFolder(config(tmp_path / "other" / "thesis.tex" / "below"))


def test_resuming_needs_the_same_configuration(tmp_path: Path) -> None:
    resume = {"run": {"if_exists": "resume"}}
    assert not opened(tmp_path / "r", **resume).resumed
    assert opened(tmp_path / "r", **resume).resumed
    more = config(tmp_path / "r", train={"steps": 7}, run={"if_exists": "resume", "log_every": 3})
    assert RunFolder(more).resumed
    different: list[tuple[str, dict[str, Any]]] = [
        ("train.seed", {"train": {"seed": 1}}),
        ("rollout.groups, optim.lr", {"optim": {"lr": 1.0}, "rollout": {"groups": 3}}),
        ("data.eval", {"data": {"train": {"generator": "arrow"}, "eval": {"generator": "arrow"}}}),
        ("model.lora", {"model": {"path": "m", "lora": {}}}),
        ("evaluation.tasks", {"evaluation": {"tasks": 3, "every": 9}}),
    ]
    for names, changes in different:
        with pytest.raises(ConfigError, match=f"configured differently in {names}; cannot resume"):
            RunFolder(config(tmp_path / "r", **resume, **changes))


def test_what_cures_a_lack_of_memory_may_change(tmp_path: Path) -> None:
    opened(tmp_path / "r")
    cures: dict[str, dict[str, Any]] = {
        "optim": {"micro_batch_tokens": 7, "logprob_chunk": 7},
        "model": {"path": "m", "gradient_checkpointing": True},
        "rollout": {"cache_mib": 7, "feature_cache_mib": 7, "graphs": False, "max_failed_share": 0.7},
        "train": {"threads": 7, "shard": True, "offload": True, "learners": 2},
        "reward": {"workers": 7, "deadline_s": 7.0},
        "algorithm": {"max_logprob_gap": 7.0},
    }
    assert RunFolder(config(tmp_path / "r", run={"if_exists": "resume"}, **cures)).resumed


def test_a_file_that_has_moved_is_the_same(tmp_path: Path) -> None:
    opened(tmp_path / "r", data={"train": {"path": "a/t.parquet"}})
    run = {"if_exists": "resume"}
    assert RunFolder(config(tmp_path / "r", run=run, data={"train": {"path": "b/t.parquet"}})).resumed
    with pytest.raises(ConfigError, match=r"configured differently in data\.train"):
        RunFolder(config(tmp_path / "r", run=run, data={"train": {"generator": "arrow"}}))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    again = config(tmp_path / "r", run={"if_exists": "resume"})
    refusal = rf"run.dir: process {os.getpid()} of \S+ is at work in .*r; wait for its end, or choose another"
    with ExitStack() as first:
        RunFolder(config(tmp_path / "r"), first).begin()
        for _ in range(2):
            with pytest.raises(ConfigError, match=refusal):
                RunFolder(again, ExitStack())
    with ExitStack() as second:
        RunFolder(again, second).begin()
        with pytest.raises(ConfigError, match=refusal):
            RunFolder(again, ExitStack())
        assert load_config(tmp_path / "r" / "config.yaml") == again


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """NFS, others, and Lustre that was mounted without them."""

    def flock(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with ExitStack() as cleanup:
        RunFolder(config(tmp_path / "r"), cleanup).begin()
        assert RunFolder(config(tmp_path / "r", run={"if_exists": "resume"}), cleanup).resumed


def test_a_full_disk_leaves_no_half_of_a_file_and_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that is there is never written again, and a run without its configuration cannot go on."""

    def fill(path: Path, *_: Any, **__: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", lambda path, *_, **__: fill(path))
        with ExitStack() as cleanup, pytest.raises(OSError, match=r"No space left on device: '\S+/r/config\.yaml'"):
            RunFolder(config(tmp_path / "r"), cleanup).begin()
    assert [file.name for file in (tmp_path / "r").iterdir()] == ["lock"]
    run = opened(tmp_path / "r")
    with monkeypatch.context() as full:
        full.setattr(Pillow.Image, "save", lambda image, path, *_, **__: fill(path))
        with pytest.raises(OSError, match=r"No space left on device: '\S+/images/\w+\.png'"):
            run.trajectories(0, [episode(Verdict(1.0, True))], {})
    assert not list((run.path / "images").iterdir())
    with monkeypatch.context() as full:
        full.setattr(json, "dumps", lambda *_, **__: fill(run.path / "metrics.jsonl"))
        with pytest.raises(OSError, match=r"No space left on device: '\S+/metrics\.jsonl'"):
            run.metrics(0, {"a": 1.0})


def test_metrics_that_are_not_finite_become_null(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    run.metrics(0, {"a": 1.5, "b": float("nan"), "c": float("inf"), "d": -float("inf"), "e": 3})
    run.metrics(1, {"a": np.float64(2.5)})
    first, second = lines(run, "metrics.jsonl")
    assert first == {"step": 0, "a": 1.5, "b": None, "c": None, "d": None, "e": 3}
    assert second == {"step": 1, "a": 2.5}


def test_records_hold_every_token_and_every_image(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    done = episode(Verdict(0.1, False, terms={"format": 0.1}), Verdict(1.0, True, "well"))
    run.trajectories(4, [done], {"g/0": [0.5, -1.0, float("nan")], "g/1": [9.0]})
    (record,) = lines(run, "trajectories.jsonl")
    expected = {"step": 4, "id": "g/0", "group": "g", "task": "t/1", "data_source": "test", "answer": "up"}
    assert {**record, **expected, "status": "solved", "error": None} == record
    assert (record["solved"], record["solved_first_try"]) == (True, False)
    assert record["advantages"] == {"g/0": [0.5, -1.0, None]}
    rebuilt: list[int] = []
    for turn, written in zip(done.turns, record["turns"], strict=True):
        assert written["continues"] and written["text"] == turn.text
        rebuilt += [token for segment in written["new_context"] for token in segment["token_ids"]]
        assert rebuilt == [token for segment in turn.context for token in segment.token_ids]
        action = written["action"]
        rebuilt += action["token_ids"]
        assert action["token_ids"] == list(turn.action.token_ids)
        assert action["logprobs"] == pytest.approx(turn.action.logprobs, abs=1e-6)
        assert (action["weight_versions"], action["stop_reason"]) == ([3] * len(turn.action), "end_of_turn")
        assert action["reward"] == turn.action.reward
    looked, wrong, right = record["turns"]
    assert looked["verdict"] is None and looked["feedback"] is None
    assert looked["tool_calls"] == [{"name": "look", "arguments": {}}]
    (result,) = looked["tool_results"]
    assert result == {"text": "Image 1 is what you see.", "images": [HIDDEN.hash], "error": False}
    assert wrong["verdict"] == {"reward": 0.1, "solved": False, "terms": {"format": 0.1}}
    assert (wrong["feedback"], right["feedback"], right["judge_error"]) == ("No. Try again.", None, None)
    shown = [image for turn in record["turns"] for s in turn["new_context"] for image in s.get("images", [])]
    assert [image["grid"] for image in shown] == [[1, 2, 2], [1, 4, 4]]
    assert image_hashes(run) == {image["hash"] for image in shown}


def image_hashes(run: RunFolder) -> set[str]:
    """Names of the images, each of whose pixels must hash to its name."""
    names = set()
    for file in (run.path / "images").iterdir():
        with Pillow.open(file) as stored:
            assert Image(np.array(stored)).hash == file.stem
        names.add(file.stem)
    return names


def test_an_image_that_no_turn_came_to_see_is_kept_too(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    done = episode(max_turns=1)
    assert done.status is EpisodeStatus.MAX_TURNS
    run.trajectories(0, [done, done], {})
    assert image_hashes(run) == {HIDDEN.hash, an_image(28).hash}
    first, second = lines(run, "trajectories.jsonl")
    assert first == second and first["turns"][0]["tool_results"][0]["images"] == [HIDDEN.hash]


def test_a_turn_with_a_context_of_its_own_is_written_whole() -> None:
    done = episode(Verdict(0.0, False), Verdict(1.0, True))
    first, _, last = done.turns
    rewritten = dataclasses.replace(done, turns=(first, dataclasses.replace(last, context=first.context)))
    record = trajectory_record(rewritten, {})
    assert [turn["continues"] for turn in record["turns"]] == [True, False]
    assert record["turns"][1]["new_context"] == record["turns"][0]["new_context"]


def test_advantages_go_to_their_own_trajectory(tmp_path: Path) -> None:
    """Member 1 must not take those of members 10 and 11, nor a turn's for another's."""
    names = ("g/1", "g/10", "g/1/0", "g/1/1", "g/11/0", "g")
    advantages = {name: [float(number)] for number, name in enumerate(names, start=1)}
    member = dataclasses.replace(episode(Verdict(1.0, True)), member=1)
    run = opened(tmp_path / "r")
    run.trajectories(0, [member], advantages)
    (record,) = lines(run, "trajectories.jsonl")
    assert record["advantages"] == {"g/1": [1.0], "g/1/0": [3.0], "g/1/1": [4.0]}


def test_a_failed_trajectory_is_recorded_with_its_message(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    run.trajectories(0, [Trajectory(TASK, "g", 0, (), EpisodeStatus.FAILED, "t/1: too long")], {})
    (record,) = lines(run, "trajectories.jsonl")
    assert (record["status"], record["error"], record["turns"]) == ("failed", "t/1: too long", [])


def test_half_a_surrogate_in_a_users_feedback_is_written_as_its_escape(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    done = episode(Verdict(1.0, True))
    turns = (*done.turns[:1], dataclasses.replace(done.turns[1], feedback="half \ud83d"), *done.turns[2:])
    run.trajectories(0, [dataclasses.replace(done, turns=turns)], {})
    assert lines(run, "trajectories.jsonl")[0]["turns"][1]["feedback"] == "half \ud83d"


def test_rewind_drops_what_will_be_repeated(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    run.rewind(3)  # nothing there yet
    done = episode(Verdict(0.0, False), Verdict(1.0, True))
    for step in range(4):
        run.metrics(step, {"a": float(step)})
        run.trajectories(step, [done], {})
    run.rewind(2)
    assert [record["step"] for record in lines(run, "metrics.jsonl")] == [0, 1]
    assert [record["step"] for record in lines(run, "trajectories.jsonl")] == [0, 1]
    assert "\u2028" in lines(run, "trajectories.jsonl")[0]["turns"][1]["text"]  # no line ends at such a character
    run.rewind(0)
    assert (run.path / "metrics.jsonl").read_text() == ""


def test_rewind_leaves_what_it_keeps_in_its_place(tmp_path: Path) -> None:
    """A copy would need room for a second file, and a kill could come in the middle of it."""
    run = opened(tmp_path / "r")
    for step in range(4):
        run.metrics(step, {"a": 1.0})
    file = run.path / "metrics.jsonl"
    inode, text = file.stat().st_ino, file.read_text()
    run.rewind(2)
    assert file.stat().st_ino == inode
    assert file.read_text() == text[: text.index('{"step": 2')]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("metrics.jsonl", "garbage", r"line 2 is no record \(.*\); mend or remove it"),
        ("metrics.jsonl", '{"step": 0, "a": 1.', r"line 2 is no record \(.*\); mend or remove it"),
        ("metrics.jsonl", '{"a": 1.0}', "line 2 does not begin with its step; mend or remove it"),
        ("trajectories.jsonl", "garbage", "line 2 does not begin with its step; mend or remove it"),
    ],
)
def test_rewind_refuses_what_is_no_record(tmp_path: Path, name: str, line: str, message: str) -> None:
    run = opened(tmp_path / "r")
    file = run.path / name
    damaged = '{"step": 0, "a": 1.0}\n' + line + '\n{"step": 1, "a": 1.0}\n'
    file.write_text(damaged)
    with pytest.raises(ConfigError, match=rf"{name}: {message}"):
        run.rewind(1)
    assert file.read_text() == damaged


def test_rewind_drops_a_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    run.metrics(0, {"a": 1.0})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a": 2.')
    run.rewind(5)
    run.metrics(5, {"a": 3.0})
    assert lines(run, "metrics.jsonl") == [{"step": 0, "a": 1.0}, {"step": 5, "a": 3.0}]


def test_the_summary_is_written(tmp_path: Path) -> None:
    run = opened(tmp_path / "r")
    run.summary({"steps": 3, "versions": {"torch": "2.13.0"}})
    assert json.loads((run.path / "summary.json").read_text()) == {"steps": 3, "versions": {"torch": "2.13.0"}}
