"""One bad sample does not end a run: it is skipped, counted and reported; a configured share of them ends it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from npu_vlrl.types import Message, Task
from npu_vlrl.workflow.rewards import make_judge
from tests.support.models import tiny_folder
from tests.support.program import SMALL, Outcome, config_file, parquet, png, program, records, row


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


BAD: dict[int, tuple[str, dict[str, Any]]] = {
    2: ("images[0]: the image is damaged or truncated", {"images": [{"bytes": png(64)[:-900], "path": None}]}),
    5: ("prompt: missing", {"prompt": None}),
    7: (
        "prompt[0].content: more <image> tags or image parts than there are images",
        {"prompt": [{"role": "user", "content": "<image><image>?"}]},
    ),
    11: ("reward_model.ground_truth: the answer", {"reward_model": {"style": "rule", "ground_truth": "\x0crac"}}),
    13: ("images[0]: the image has zero bytes", {"images": [{"bytes": b"", "path": None}]}),
    17: ("images[0]: the image path '../../etc/x' leaves", {"images": [{"bytes": None, "path": "../../etc/x"}]}),
    19: ("reward_model.ground_truth: the gold answer 'sideways' is none of the choices",
         {"reward_model": {"style": "rule", "ground_truth": "sideways"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    parquet(folder / "bad.parquet", [row(i, **BAD[i][1]) if i in BAD else row(i) for i in range(24)])
    parquet(folder / "good.parquet", [row(i) for i in range(4)])
    return folder


def train(run: Path, train_file: Path, eval_file: Path, *overrides: str, **data: Any) -> Outcome:
    run.mkdir(parents=True)
    values = {"train": {"path": str(train_file), **data}, "eval": {"path": str(eval_file), **data}}
    source = config_file(run, data=values, reward={"options": {"choices": ["up", "down"]}})
    return program("train", "--config", source, "--run-dir", run / "r", *SMALL, *overrides)


def test_rows_that_cannot_be_used_are_told_with_row_field_and_remedy(tmp_path: Path, folder: Path) -> None:
    """Below the allowed share the run goes on, and each bad row is named once for either source."""
    bad = folder / "bad.parquet"
    settings = ["train.steps=3", "rollout.groups=8", "evaluation.tasks=0"]
    done = train(tmp_path / "a", bad, bad, *settings, shuffle=False, max_skip_share=0.4)
    assert (done.code, done.err) == (0, "")
    for number, (reason, _) in BAD.items():
        told = [line for line in done.out.splitlines() if f"bad.parquet row {number}, {reason}" in line]
        assert [line.split(" skipped ")[0] for line in told] == ["evaluation:", *[told[1].split(" skipped ")[0]]]
        assert told[1].startswith("step ") and len(told) == 2
    steps = [m for m in records(tmp_path / "a" / "r", "metrics.jsonl") if "loss" in m or "skipped_records" in m]
    assert [m["skipped_records"] for m in steps][-1] == len(BAD)
    assert [m["failed_groups"] for m in steps] == [0, 0, 0]
    evaluated = [m["eval/all/tasks"] for m in records(tmp_path / "a" / "r", "metrics.jsonl") if "eval/all/tasks" in m]
    assert evaluated == [24 - len(BAD)] * 2
    seen = {t["task"] for t in records(tmp_path / "a" / "r", "trajectories.jsonl")}
    assert seen == {f"bad/{i}" for i in range(24) if i not in BAD}


def test_too_many_bad_rows_end_the_run_with_the_last_reason(tmp_path: Path, folder: Path) -> None:
    bad, good = folder / "bad.parquet", folder / "good.parquet"
    settings = ["train.steps=9", "rollout.groups=8"]
    done = train(tmp_path / "a", bad, good, *settings, shuffle=False, max_skip_share=0.25)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("npu-vlrl: bad.parquet: 7 of 20 rows were skipped, more than the allowed share 0.25;")
    assert "The last one: bad.parquet row 19, reward_model.ground_truth" in line
    assert not done.out and not (tmp_path / "a" / "r" / "model").exists()  # nothing had begun
    at_start = train(tmp_path / "b", good, bad, *settings, "evaluation.tasks=0", shuffle=False, max_skip_share=0.25)
    assert "bad.parquet: 7 of 20 rows were skipped" in at_start.refused()


def test_an_evaluation_does_not_mind_the_training_data(tmp_path: Path, folder: Path) -> None:
    """It draws none of them."""
    values = {"train": {"path": str(folder / "bad.parquet"), "max_skip_share": 0.0}}
    values["eval"] = {"path": str(folder / "good.parquet")}
    source = config_file(tmp_path, data=values, reward={"options": {"choices": ["up", "down"]}})
    done = program("eval", "--config", source, "--run-dir", tmp_path / "r", *SMALL)
    assert (done.code, done.err) == (0, "")
    assert "rows were skipped" in program("train", "--config", source, "--run-dir", tmp_path / "t", *SMALL).refused()


def test_files_that_are_no_data(tmp_path: Path, folder: Path) -> None:
    good = folder / "good.parquet"
    broken, text = tmp_path / "broken.parquet", tmp_path / "rows.txt"
    broken.write_bytes(good.read_bytes()[:-100])
    text.write_text("{}")
    empty = parquet(tmp_path / "empty.parquet", [])
    for file, message in ((broken, "cannot be read"), (text, "unknown kind of file"), (empty, "there are no rows")):
        message_ = train(tmp_path / file.stem, file, good).refused()
        assert str(file) in message_ and message in message_


def test_a_line_of_jsonl_that_is_no_json(tmp_path: Path, folder: Path) -> None:
    rows = [json.dumps({**row(i), "images": [], "prompt": [{"role": "user", "content": "?"}]}) for i in range(4)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([rows[0], '{"prompt": [', *rows[1:]]) + "\n")
    done = train(tmp_path / "a", file, folder / "good.parquet", "rollout.groups=4", shuffle=False, max_skip_share=0.3)
    assert done.code == 0
    assert "step 0: skipped rows.jsonl row 1: the row cannot be read" in done.out


LONG = {"prompt": [{"role": "user", "content": "<image>" + "Which way? " * 200}]}


def test_prompts_that_do_not_fit_cost_their_group_only(tmp_path: Path, folder: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", [row(i, **(LONG if i in (1, 2) else {})) for i in range(6)])
    limits = ["workflow.context_tokens=120", "rollout.groups=6"]
    done = train(tmp_path / "a", file, folder / "good.parquet", *limits, shuffle=False)
    assert (done.code, done.err) == (0, "")
    (step,) = [m for m in records(tmp_path / "a" / "r", "metrics.jsonl") if "failed_groups" in m]
    assert step["failed_groups"] == 2
    for name in ("rows/1", "rows/2"):
        assert f"step 0: {name}: the prompt has " in done.out
    assert "rows/3: the prompt" not in done.out
    written = [t for t in records(tmp_path / "a" / "r", "trajectories.jsonl") if t["group"].startswith("step")]
    assert [t["task"] for t in written if t["status"] == "failed"] == ["rows/1"] * 2 + ["rows/2"] * 2
    assert len(written) == 12
    stricter = train(
        tmp_path / "b", file, folder / "good.parquet", *limits, "rollout.max_failed_share=0.3", shuffle=False
    )
    assert stricter.code == 1 and "2 of 6 groups of step0 cannot be used" in stricter.err


def test_a_run_without_a_prompt_that_fits_fails_with_the_reason(tmp_path: Path, folder: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", [row(i, **LONG) for i in range(3)])
    done = train(tmp_path / "a", file, folder / "good.parquet", "workflow.context_tokens=120")
    assert done.code == 1
    assert done.err.startswith("npu-vlrl: the run failed: 2 of 2 groups of step0 cannot be used:\n  rows/")
    assert "workflow.context_tokens=120; raise it, shorten the prompt or lower model.max_pixels" in done.err


REWARD = """
import time

def reward(task, text, history, images):
    number = task["id"].rpartition("/")[2]
    if number == "1":
        raise ValueError("cannot score this one")
    if number == "2":
        time.sleep(60)
    if number == "3":
        return float("inf")
    return {"reward": 0.25, "solved": False, "terms": {"seen": len(images)}}
"""


def test_a_reward_that_raises_or_hangs_for_some_answers(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    arguments = ["rollout.groups=4", "evaluation.tasks=1", "rollout.max_failed_share=0.75"]
    values = {"train": {"path": str(folder / "good.parquet"), "shuffle": False}}
    rule = {"rule": f"{tmp_path}/mine.py:reward", "deadline_s": 0.5, "failed_reward": -2.0, "workers": 2}
    source = config_file(tmp_path, data=values, reward=rule)
    small = [word for word in SMALL if not word.startswith("reward")]
    done = program("train", "--config", source, "--run-dir", tmp_path / "r", *small, *arguments)
    assert (done.code, done.err) == (0, "")
    assert "cannot score this one" in done.out and "longer than 0.5 s" in done.out and "reward=inf" in done.out
    (step,) = [m for m in records(tmp_path / "r", "metrics.jsonl") if "judge_errors" in m]
    assert (step["judge_errors"], step["judge_failed"], step["failed_groups"]) == (6, 0.75, 0)
    assert done.out.count("cannot score this one") == 1 and "failed on 2 of 8 answers: the rule" in done.out
    rewards: dict[str, list[float]] = {}
    for record in records(tmp_path / "r", "trajectories.jsonl"):
        if record["group"].startswith("step"):
            (turn,) = record["turns"]
            rewards.setdefault(record["task"], []).append(turn["action"]["reward"])
            assert (turn["judge_error"] is None) == (record["task"] == "good/0")
    assert rewards == {"good/0": [0.25] * 2, **{f"good/{i}": [-2.0] * 2 for i in (1, 2, 3)}}
    assert np.isfinite(step["reward"])
    stricter = program("train", "--config", source, "--run-dir", tmp_path / "s", *small, *arguments[:2])
    assert stricter.code == 1 and "failed: the judge failed on 6 of 8 answers of step0, more than" in stricter.err


def test_a_reward_that_always_fails_ends_a_training_and_an_evaluation(tmp_path: Path, folder: Path) -> None:
    """One line for each reason, with how often."""
    (tmp_path / "mine.py").write_text("def reward(task, text, history, images):\n    return task['nokey']\n")
    values = {"train": {"path": str(folder / "good.parquet")}}
    source = config_file(tmp_path, data=values, reward={"rule": f"{tmp_path}/mine.py:reward"})
    small = [word for word in SMALL if not word.startswith("reward")]
    done = program("train", "--config", source, "--run-dir", tmp_path / "t", *small, "evaluation.tasks=0")
    reason = f"{tmp_path}/mine.py:reward raised KeyError: 'nokey' ({tmp_path}/mine.py, line 2)"
    evaluated = program("eval", "--config", source, "--run-dir", tmp_path / "e", *small, "evaluation.tasks=4")
    assert (done.code, evaluated.code) == (1, 1)
    assert evaluated.err.startswith("npu-vlrl: the run failed: the judge failed on 4 of 4 answers of evaluation0")
    assert evaluated.err.count(reason) == 1


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = ground_truth == "up" and solution_str == "up" and data_source == "made" and extra_info["id"] == "0"
    return {"score": float(right), "length": len(solution_str), "pred": solution_str}
"""


def test_a_reward_function_of_verl_gets_what_its_parameters_name(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(VERL)
    judge = make_judge(f"{tmp_path}/theirs.py:compute_score", {}, workers=1, deadline_s=10)
    task = Task("t", (Message("user", ("?",)),), "up", "made", {"id": "0"})
    verdicts = [asyncio.run(judge.judge(task, text, ())) for text in ("up", "down")]
    judge.close()
    assert [(v.reward, v.solved, v.terms) for v in verdicts] == [(1, True, {"length": 2}), (0, False, {"length": 4})]


@pytest.mark.parametrize("parameters", ["", "a, b, c, d", "data_sourcez, solution_strz, truths, extras", "*given"])
def test_a_reward_function_with_other_parameters_is_refused_at_once(tmp_path: Path, parameters: str) -> None:
    (tmp_path / "mine.py").write_text(f"def reward({parameters}): return 1.0")
    source = config_file(tmp_path, data={"train": {"generator": "photo"}})
    said = program("train", "--config", source, f"reward.rule={tmp_path}/mine.py:reward").refused()
    assert f"mine.py:reward takes ({parameters}); write it as def reward(task, text, history, images), or with" in said


def checked(tmp_path: Path, file: Path, *words: str, **changes: Any) -> Outcome:
    values = {"train": {"path": str(file), **changes}, "eval": {"path": str(file.with_name("good.parquet"))}}
    source = config_file(tmp_path, data=values, reward={"options": {"choices": ["up", "down"]}})
    return program("data", "check", "--config", source, *SMALL, *words)


def test_data_check_names_every_bad_row_before_a_training(tmp_path: Path, folder: Path) -> None:
    """An image of 28x28 pixels is one token, the placeholder that the template writes."""
    found = checked(tmp_path, folder / "bad.parquet", max_skip_share=0.3)
    told = found.out.splitlines()
    assert told[0] == f"data.train ({folder / 'bad.parquet'}): 24 rows, 17 usable"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("qwen2_5_vl"))
    content = [{"type": "image"}, {"type": "text", "text": "Which way?"}]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)["input_ids"]
    n = len(ids)
    assert told[1] == f"  prompt: {n} to {n} tokens, median {n}, of workflow.context_tokens=4096"
    assert told[2:4] == ["  images in a prompt: 1 to 1", "  kinds: made 17"]
    for line, (number, (reason, _)) in zip(told[4:11], BAD.items(), strict=True):
        assert line.startswith(f"  bad.parquet row {number}, {reason}")
    assert told[11] == f"data.eval ({folder / 'good.parquet'}): 4 rows, 4 usable"
    assert told[-2] == f"data.train ({folder / 'bad.parquet'}): no task is made of: ability 24, reward_model.style 24"
    assert told[-1] == f"data.eval ({folder / 'good.parquet'}): no task is made of: ability 4, reward_model.style 4"
    assert found.code == 0  # 7 of 24 are allowed, and these no more
    assert checked(tmp_path, folder / "bad.parquet", max_skip_share=0.25).code == 2
    small = checked(tmp_path, folder / "good.parquet", f"workflow.context_tokens={n}", "--limit", "3")
    assert small.code == 2 and small.out.count(f"the prompt has {n} tokens and does not fit") == 6


def test_data_check_tells_what_a_training_ignores_and_meets(tmp_path: Path, folder: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>Which way?"}]
    shown = [{"role": "system", "content": "<image>Be brief."}, {"role": "user", "content": "Which way?"}]
    changes: dict[int, dict[str, Any]] = {1: {"prompt": said}, 2: {"prompt": shown}, 3: {"extra_info": {"id": "0"}}}
    rows = [row(i, **changes.get(i, {})) for i in range(4)]
    replaced = checked(
        tmp_path, parquet(folder / "chat.parquet", rows), "workflow.system_prompt=Hm.", max_skip_share=0.3
    )
    assert (
        "chat/2: workflow.system_prompt replaces the system message, which holds 1 images; write it as" in replaced.out
    )
    assert "chat.parquet): system messages that workflow.system_prompt replaces: 1\n" in replaced.out
    assert "chat.parquet): ids that several rows have: 1, such as chat/0; extra_info.id should differ" in replaced.out
    assert replaced.code == 0 and "no task is made of: ability 4, reward_model.style 4" in replaced.out
    stricter = checked(
        tmp_path,
        folder / "chat.parquet",
        "workflow.system_prompt=Hm.",
        "rollout.max_failed_share=0.2",
        max_skip_share=0.3,
    )
    assert (
        stricter.code == 2 and "a training would end: 25% of its groups cannot be used; rollout.max_f" in stricter.out
    )
    plain = config_file(tmp_path, data={"train": {"path": str(folder / "good.parquet")}})
    unnamed = program("data", "check", "--config", plain, *SMALL, "reward.rule=benchmark")
    assert unnamed.code == 2 and unnamed.out.count("extra_info.benchmark is None; make the data with") == 4
    lines = [
        json.dumps({**row(i), "images": [], "prompt": [{"role": "user", "content": "?"}] * (i > 14)})
        for i in range(200)
    ]
    (folder / "first.jsonl").write_text("\n".join(lines))
    together = checked(tmp_path, folder / "first.jsonl", max_skip_share=0.1, shuffle=False)
    assert together.code == 2 and "a training would end after 20 rows, of which too many cannot be used" in together.out
    assert checked(tmp_path, folder / "first.jsonl", max_skip_share=0.1).code == 0
