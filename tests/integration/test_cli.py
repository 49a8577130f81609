"""The command line: exit codes, and one clear message for each mistake."""

from __future__ import annotations

import builtins
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from npu_vlrl import __version__
from npu_vlrl.config import load_config
from tests.support.program import SMALL, Outcome, config_file, parquet, program, records, row

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_file(tmp_path_factory.mktemp("cli"), data={"train": {"generator": "arrow"}})


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m npu_vlrl …` in a process of its own, for what only a process can show."""
    return subprocess.run(
        [sys.executable, "-m", "npu_vlrl", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_exit_code_0_config_prints_what_load_config_reads_back(base: Path, tmp_path: Path) -> None:
    done = command("config", "--config", base, "train.steps=7", "--run-dir", "somewhere", "train.seed=3")
    assert (done.returncode, done.stderr) == (0, "")
    copy = tmp_path / "copy.yaml"
    copy.write_text(done.stdout)
    assert load_config(copy) == load_config(base, ["train.steps=7", "run.dir=somewhere", "train.seed=3"])


def test_config_tells_what_the_preset_fills_in(base: Path) -> None:
    said = program("config", "--config", base, "algorithm.preset=dapo", "algorithm.clip_low=0.1").out.splitlines()
    filled = {line for line in said if line.startswith("#")}
    assert "# algorithm.preset=dapo sets algorithm.clip_high=0.28" in filled
    assert "# algorithm.preset=dapo sets algorithm.dynamic_sampling=true" in filled
    assert not [line for line in filled if "clip_low" in line or "gae_lambda" in line]  # given; not of this estimator
    refused = program("config", "--config", base, "algorithm.preset=grpo", "algorithm.gae_lambda=0.9").refused()
    assert "the estimator grpo has no such setting" in refused


def test_exit_code_2_bad_input(base: Path, tmp_path: Path) -> None:
    done = command("train", "--config", base, "--run-dir", tmp_path / "r", NPU_VLRL_PLATFORM="xyz")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line == "npu-vlrl: NPU_VLRL_PLATFORM=xyz is not a platform; choose one of " + line.rpartition("one of ")[2]
    assert "cpu" in line and not (tmp_path / "r").exists()


def test_exit_code_1_a_run_that_fails(base: Path, tmp_path: Path) -> None:
    """No prompt fits, so there is nothing to learn from."""
    limits = ["workflow.context_tokens=20", *SMALL, "reward.rule=tagged", "evaluation.tasks=1"]
    done = command("train", "--config", base, "--run-dir", tmp_path / "r", *limits)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("npu-vlrl: the run failed: 2 of 2 groups of step0 cannot be used:\n  arrow/0/")
    assert "does not fit into workflow.context_tokens=20; raise it" in done.stderr
    assert "evaluation skipped arrow/" in done.stdout


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.stpes=1", "config.yaml:\n  train.stpes: unknown key; did you mean train.steps?"),
        ("train.steps=many", "train.steps: Input should be a valid integer"),
        ("data.train.generator=null & data.train.path=/no/such.parquet", "data: /no/such.parquet does not exist"),
        ("data.eval.path=/no/such.parquet", "data: /no/such.parquet does not exist"),
        ("model.path=/no/model", "model.path: /no/model is not a Hugging Face model folder"),
        ("model.path=tiny:gpt", "model.path: unknown tiny model 'gpt'; choose one of glm4v, internvl"),
        ("model.max_pixels=5", "max_pixels 5"),
        ("model.lora.targets=[nothing]", "model.lora.targets: no language-model layer is named nothing"),
        ("reward.rule=math_verfy", "reward: unknown reward rule 'math_verfy'; did you mean 'math_verify'?"),
        ("reward.options.formt=1", "reward: unknown option of the rule 'math_verify': 'formt'"),
        ("reward={rule: tagged, options: {format_weight: 2}}", "reward: format_weight is 2; it must be a number"),
        ("reward.rule=/no/such.py:f", "there is no file /no/such.py"),
        ("reward.deadline_s=4000", "reward: the deadline of a judge is 4000.0 s"),
        ("workflow.tools=[rotat]", "workflow.tools: unknown tool 'rotat'; did you mean 'rotate'?"),
        ("workflow.tools=[look, look]", "workflow.tools: the tool 'look' is named twice"),
        ("workflow.tools=['/no/such.py:f']", "workflow.tools: there is no file /no/such.py"),
        ("algorithm={preset: rloo, advantage_std: batch}", "algorithm.advantage_std: the estimator rloo has no such"),
        ("algorithm.preset=rico_gae & workflow.export_style=individual", "algorithm.loss_mask=false and algorithm.adv"),
        ("algorithm.preset=gigpo", "algorithm.advantage=gigpo compares states, and environment.name=visual_qa does"),
        ("run.dir=/dev/null", "run.dir: /dev/null exists and is not a run folder"),
        ("run.dir=/dev/null/below", "run.dir: /dev/null/below cannot be made"),
    ],
)
def test_mistakes_in_the_configuration(base: Path, tmp_path: Path, setting: str, message: str) -> None:
    done = program("train", "--config", base, "--run-dir", tmp_path / "r", *setting.split(" & "))
    assert message in done.refused()
    assert not (tmp_path / "r" / "config.yaml").exists()


@pytest.mark.parametrize(("platform", "message"), [("npu", "NPU_VLRL_PLATFORM=npu"), ("cuda", "CUDA")])
def test_hardware_that_is_not_there(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, message: str
) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", platform)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in program("train", "--config", base, "--run-dir", tmp_path / "r").refused()


def test_after_a_refusal_the_corrected_command_starts(base: Path, tmp_path: Path) -> None:
    """What was refused leaves no run behind that would be in the way."""
    arguments = ["train", "--config", base, *SMALL, "train.steps=0", "--run-dir", tmp_path / "r"]
    assert "no language-model layer" in program(*arguments, "model.lora.targets=[nothing]").refused()
    assert program(*arguments).code == 0
    message = program(*arguments).refused()
    assert "holds a run; continue it with run.if_exists=resume or choose another run.dir" in message
    assert (
        "configured differently in rollout.temperature"
        in program(*arguments, "run.if_exists=resume", "rollout.temperature=0.5").refused()
    )
    assert program(*arguments, "run.if_exists=resume").code == 0


def test_eval_plays_and_reports_without_learning(base: Path, tmp_path: Path) -> None:
    done = program("eval", "--config", base, *SMALL, "--run-dir", tmp_path / "r", "evaluation.tasks=3")
    assert (done.code, done.err) == (0, "")
    assert "evaluation, answers to each task: 1" in done.out and (tmp_path / "r" / "evaluation.json").is_file()
    (metrics,) = records(tmp_path / "r", "metrics.jsonl")
    assert metrics["eval/all/tasks"] == metrics["eval/arrow/tasks"] == 3
    assert len(records(tmp_path / "r", "trajectories.jsonl")) == 3
    assert not (tmp_path / "r" / "checkpoints").exists() and not (tmp_path / "r" / "export").exists()


def test_help_version_and_words_that_are_no_command(base: Path) -> None:
    done = program("--help")
    assert done.code == 0
    for name in ("train", "eval", "config", "data"):
        assert f"    {name}" in done.out
    assert "key=value" in program("train", "--help").out
    assert program("--version").out.strip() == __version__
    for words in ([], ["trian"], ["train"], ["data"], ["config", "--config", base, "--run-dri", "x"]):
        refused = program(*words)
        assert refused.code == 2 and "npu-vlrl" in refused.err and refused.out == ""
    assert "unrecognized arguments: --run-dri" in program("config", "--config", base, "--run-dri", "x").err
    assert "unrecognized arguments: a=1" in program("data", "geo3k", "--out", "x", "a=1").err
    assert "no such configuration file" in program("config", "--config", "/no/such.yaml").refused()


def test_a_full_disk_and_ctrl_c_are_a_message(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    def fail(error: BaseException) -> Outcome:
        def load(options: object) -> None:
            raise error

        monkeypatch.setattr("npu_vlrl.commands.train.load", load)
        return program("config", "--config", base)

    written = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")  # its words
    for error in (written, OSError(errno.ENOSPC, "No space left on device", "/r/images/1.png")):
        done = fail(error)
        (line,) = done.err.splitlines()
        assert done.code == 1 and line.startswith("npu-vlrl: the run failed: ")
        assert "No space left on device" in line and "free some space, and go on with run.if_exists=resume" in line
    assert "'/r/images/1.png'" in line
    denied = fail(PermissionError(errno.EACCES, "Permission denied", "/r/x"))
    assert denied.code == 2 and "/r/x" in denied.err and "Traceback" not in denied.err
    with pytest.raises(KeyError):  # a fault of ours, whose traceback is wanted
        fail(KeyError("x"))
    assert fail(KeyboardInterrupt()) == Outcome(130, "", "npu-vlrl: ended by Ctrl-C\n")


def test_ctrl_c_while_libraries_are_imported(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    def pressed(name: str, *rest: Any) -> Any:
        if name == "npu_vlrl.train_loop":
            raise KeyboardInterrupt
        return original(name, *rest)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", pressed)
    assert program("train", "--config", base) == Outcome(130, "", "npu-vlrl: ended by Ctrl-C\n")


def test_data_geo3k_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    def geo3k(*arguments: object) -> str:
        return program("data", "geo3k", *arguments).refused()

    assert "there is no such file" in geo3k("--source", tmp_path, "--out", tmp_path / "out")
    assert "--eval-share must be at least 0 and below 1" in geo3k("--out", tmp_path, "--eval-share", 1)
    assert "--out: " in geo3k("--out", "/dev/null/x")


def test_a_changed_data_file_cannot_be_resumed_on(base: Path, tmp_path: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", [row(i) for i in range(3)])
    source = config_file(tmp_path, data={"train": {"path": str(file)}})
    arguments = ["train", "--config", source, *SMALL, "--run-dir", tmp_path / "r", "run.if_exists=resume"]
    assert program(*arguments).code == 0
    parquet(file, [row(i) for i in range(4)])
    done = program(*arguments, "train.steps=2")
    assert (done.code, done.err.startswith("npu-vlrl: data.train: rows.parquet changed since the run ")) == (2, True)
    assert "begin another run with another run.dir" in done.err and "Traceback" not in done.err


def test_control_characters_of_data_do_not_reach_the_terminal(tmp_path: Path) -> None:
    rows = [row(0, data_source="evil\x1b[2J", extra_info={"id": "\x1b]0;x\x07"}), row(1, images=[])]
    file = parquet(tmp_path / "rows.parquet", rows)
    source = config_file(tmp_path, data={"train": {"path": str(file), "max_skip_share": 1}})
    done = program("train", "--config", source, *SMALL, "--run-dir", tmp_path / "r")
    assert done.code == 0
    assert "evil\\x1b[2J" in done.out and "\\x1b]0;x\\x07" in done.out
    failed = program("train", "--config", source, *SMALL, "workflow.context_tokens=20", "--run-dir", tmp_path / "q")
    refused = program("config", "--config", "/no/\x1b[2J.yaml")
    assert (failed.code, refused.code) == (1, 2)
    assert "rows/\\x1b]0;x\\x07: the prompt has" in failed.err and "/no/\\x1b[2J.yaml" in refused.err
    for text in (done.out, done.err, failed.out, failed.err, refused.err):
        assert not {"\x1b", "\x07"} & set(text)
