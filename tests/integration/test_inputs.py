"""What a run reads may not change between its stop and its resumption without a word."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_vlrl.config import Config, ConfigError, load_config
from npu_vlrl.export.run import export_run
from npu_vlrl.model.inspect import READ_AS_JSON, TOKENIZER, VOCABULARY, model_files
from npu_vlrl.model.weight_files import INDEX, SINGLE
from npu_vlrl.report.absolute_paths import rooted
from npu_vlrl.report.fingerprints import Inputs, code_files, differences
from npu_vlrl.train_loop import train
from tests.support.learning import tiny_folder
from tests.support.runs import REWARD, metrics, small_config

torch.set_num_threads(1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder(), tmp_path / "model")


def inputs(config: Config) -> Inputs:
    return Inputs(config, rooted(config))


def begun(config: Config) -> Config:
    """As a run that has recorded what it reads."""
    Path(config.run.dir).mkdir()
    inputs(config).record()
    return config


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        inputs(config).check()
    return str(caught.value)


# --- the model -------------------------------------------------------------------------------------------------------


def one_number(file: Path) -> None:
    """A weight in the middle of the file; its size, its ends and its time stay."""
    before, data = file.stat(), bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_template(file: Path) -> None:
    file.write_text(file.read_text() + "{# #}")


def another_json(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"other": 1}))


CHANGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "weights": ("model.safetensors", one_number, "model.safetensors changed"),
    "config": ("config.json", another_json, "config.json changed"),
    "tokenizer": ("tokenizer.json", another_json, "tokenizer.json changed"),
    "template": ("chat_template.jinja", another_template, "chat_template.jinja changed"),
    "processor": ("preprocessor_config.json", another_json, "preprocessor_config.json changed"),
    "another template": ("chat_template.json", lambda file: file.write_text("{}"), "chat_template.json is new"),
    "no processor": ("preprocessor_config.json", Path.unlink, "preprocessor_config.json is gone"),
    "an adapter": ("adapter_config.json", lambda file: file.write_text("{}"), "adapter_config.json is new"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("accept", ["raise", "accept"])
def test_another_model_is_refused_by_the_name_of_the_file(tmp_path: Path, model: Path, name: str, accept: str) -> None:
    file, change, told = CHANGES[name]
    config = begun(small_config(tmp_path / "run", model__path=str(model), run__if_changed=accept))
    inputs(config).check()
    change(model / file)
    message = refused(config)
    assert message.startswith(f"model.path: {told} since the run in {tmp_path / 'run'} began (20")
    assert "put that back" in message and "another run.dir" in message


@pytest.mark.parametrize("name", ["README.md", "LICENSE.txt", "pytorch_model.bin", "notes/config.json"])
def test_what_no_model_is_made_of_may_change(tmp_path: Path, model: Path, name: str) -> None:
    config = begun(small_config(tmp_path / "run", model__path=str(model)))
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("x")
    inputs(config).check()


def test_links_are_followed(tmp_path: Path, model: Path) -> None:
    """As in a cache of Hugging Face."""
    blob = (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to(blob)
    config = begun(small_config(tmp_path / "run", model__path=str(model)))
    one_number(blob)
    assert "model.safetensors changed" in refused(config)


def test_a_tiny_model_is_known_by_its_weights(tmp_path: Path) -> None:
    config = begun(small_config(tmp_path / "run", model__path="tiny:qwen2_5_vl"))
    one_number(next((tmp_path / "run" / "model").rglob("model.safetensors")))
    assert "model.path: model.safetensors changed" in refused(config)


def test_whatever_an_inspection_reads_is_compared(tmp_path: Path) -> None:
    read = {*READ_AS_JSON, TOKENIZER, VOCABULARY, SINGLE, INDEX, "chat_template.jinja", "merges.txt"}
    for name in read:
        (tmp_path / name).touch()
    assert model_files(tmp_path).keys() == read


def test_the_files_of_a_folder(model: Path) -> None:
    needed = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "preprocessor_config.json"}
    assert needed <= model_files(model).keys()


# --- files of the user's ---------------------------------------------------------------------------------------------


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def config_of(folder: Path, *words: str) -> Config:
    file = folder / "own.yaml"
    file.write_text(f"model: {{path: {tiny_folder()}}}\ndata: {{train: {{generator: arrow}}}}\n")
    return load_config(file, [f"run.dir={folder / 'run'}", *words])


GAME = ("environment.name=game.py:make", "data.train.generator=episodes")
SUM = "reward.rule=weighted", "reward.options.terms={a: {rule: tagged, weight: 1}, b: {rule: 'r.py:f', weight: 1}}"


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["reward.rule=r.py:f"], ["r.py"]),
        (["reward.rule=python", "reward.options.function=r.py:f"], ["r.py"]),
        (SUM, ["r.py"]),
        (["workflow.tools=[look,t.py:a,t.py:b]"], ["t.py"]),
        (["reward.rule=helped.py:f"], ["helped.py", "helper.py", "parts/__init__.py", "parts/deep.py", "second.py"]),
        (GAME, ["game.py"]),
        (["workflow.name=game.py:make"], ["game.py"]),
        ([GAME[1], "environment.name=sokoban", "environment.options.levels=levels.txt"], ["levels.txt"]),
        ([GAME[1], "environment.name=gymnasium", "environment.options.id=second:World-v0"], ["second.py"]),
        (["reward.rule=tagged"], []),
    ],
)
def test_own_files_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], files: list[str]
) -> None:
    """With the modules that they import, but for Python's own and installed ones."""
    monkeypatch.chdir(tmp_path)
    helped = "import json, torch, helper\nfrom parts.deep import x\ndef f(): import nowhere"
    written(
        tmp_path, {"helped.py": helped, "helper.py": "import second, helper", "second.py": "from npu_vlrl import a"}
    )
    written(tmp_path, {"parts/__init__.py": "", "parts/deep.py": "", "levels.txt": "; 0"})
    written(tmp_path, {"r.py": "", "t.py": "import math", "game.py": "def make(): ("})
    config = begun(config_of(tmp_path, *words))
    assert sorted(code_files(config)) == files
    for name in files:
        text = Path(name).read_text()
        Path(name).write_text(f"{text}\n# changed")
        message = refused(config)
        assert message.startswith(f"run.if_changed: {name} changed since the run in")
        assert message.endswith("or go on with what is there now by run.if_changed=accept")
        Path(name).write_text(text)
        inputs(config).check()


def test_accepted_files_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"r.py": "a"})
    begun(config_of(tmp_path, "reward.rule=r.py:f"))
    before = json.loads((tmp_path / "run" / "inputs.json").read_text())
    written(tmp_path, {"r.py": "b"})
    accepting = inputs(config_of(tmp_path, "reward.rule=r.py:f", "run.if_changed=accept"))
    accepting.check()
    (message,) = accepting.messages
    assert message.startswith("r.py changed since the run in") and "going on" in message
    accepting.record()
    after = json.loads((tmp_path / "run" / "inputs.json").read_text())
    (accepted,) = after["accepted"]
    assert accepted["sha256"] == {"r.py": [before["sha256"]["code"]["r.py"], after["sha256"]["code"]["r.py"]]}
    assert accepted["steps_done"] == 0 and before["recorded"] == after["recorded"]
    inputs(config_of(tmp_path, "reward.rule=r.py:f")).check()  # it is what it is now


# --- data ------------------------------------------------------------------------------------------------------------


def test_a_row_in_the_middle_of_the_data(tmp_path: Path) -> None:
    row = '{"prompt": "Say %d"}\n'
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(row % number for number in range(10, 10_000)))
    config = begun(config_of(tmp_path, "data.train.generator=null", f"data.train.path={file}"))
    text = file.read_text()
    file.write_text(text.replace("Say 5000", "Say 5001"))
    assert refused(config).startswith("data.train: rows.jsonl changed")
    moved = tmp_path / "there" / "rows.jsonl"  # another place is not another file
    moved.parent.mkdir()
    file.rename(moved).write_text(text)
    inputs(config_of(tmp_path, "data.train.generator=null", f"data.train.path={moved}")).check()


def test_the_data_of_evaluations(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("a\n")
    config = begun(config_of(tmp_path, f"data.eval.path={file}"))
    file.write_text("b\n")
    assert refused(config).startswith("data.eval: rows.jsonl changed")


def test_notes_of_a_downloader_are_no_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "rows.jsonl").write_text('{"prompt": "Say 1"}\n')
    config = begun(config_of(tmp_path, "data.train.generator=null", f"data.train.path={data}"))
    (data / ".cache" / "huggingface").mkdir(parents=True)
    (data / ".cache" / "huggingface" / "rows.jsonl.metadata").write_text("x")
    inputs(config).check()
    (data / "more.jsonl").write_text("{}\n")
    assert refused(config).startswith("data.train: more.jsonl is new")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "it: Input should be"),
        ("{", "it: Invalid JSON"),
        ('{"recorded": "now", "accepted": []}', "sha256: Field required"),
        ('{"recorded": "now", "accepted": "", "sha256": {}}', "accepted: Input should be"),
        ('{"recorded": "now", "accepted": [], "sha256": {"model.path": [1]}}', "sha256.model.path: Input should be"),
        ('{"recorded": "now", "accepted": [], "sha256": {"code": {"a.py": null}}}', "sha256.code.a.py: Input should"),
    ],
)
def test_damaged_fingerprints_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    config = begun(config_of(tmp_path))
    (tmp_path / "run" / "inputs.json").write_text(content)
    message = refused(config)
    assert f"inputs.json cannot be read ({reason}" in message and "put it back" in message


# --- whole runs ------------------------------------------------------------------------------------------------------

LORA: dict[str, Any] = {"model__lora": {"rank": 2, "alpha": 4}, "warm_start__steps": 0, "evaluation__tasks": 1}


def test_adapters_go_on_over_the_model_that_they_were_trained_on(tmp_path: Path, model: Path) -> None:
    run, given = tmp_path / "run", {**LORA, "model__path": str(model)}
    train(small_config(run, train__steps=1, **given))
    weights = load_file(model / "model.safetensors")
    changed = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(changed, model / "model.safetensors", {"format": "pt"})
    before = metrics(run)
    with pytest.raises(ConfigError, match=r"^model\.path: model\.safetensors changed since"):
        train(small_config(run, train__steps=2, run__if_exists="resume", **given))
    with pytest.raises(ConfigError, match=r"^model\.path: model\.safetensors changed since"):
        export_run(run, tmp_path / "out", None, adapter=False)
    assert metrics(run) == before
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    train(small_config(run, train__steps=2, run__if_exists="resume", **given))


def test_another_warm_start_and_another_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(small_config(run, train__steps=1))
    reward, weights = tmp_path / "reward.py", run / "warm_start" / "model.safetensors"
    one_number(weights)
    with pytest.raises(ConfigError, match=r"^warm_start: model\.safetensors changed since"):
        train(small_config(run, train__steps=2, run__if_exists="resume"))
    one_number(weights)  # back again
    config = small_config(run, train__steps=2, run__if_exists="resume")  # writes the reward, as it was
    reward.write_text(f"# mended\n{REWARD}")
    with pytest.raises(ConfigError, match=r"^run\.if_changed: \S*reward\.py changed since"):
        train(config)
    assert len(metrics(run)) == 3
    train(config.model_copy(update={"run": config.run.model_copy(update={"if_changed": "accept"})}))
    assert "reward.py changed since" in capsys.readouterr().out
    assert json.loads((run / "inputs.json").read_text())["accepted"][0]["steps_done"] == 1


def test_differences() -> None:
    assert differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == {
        "b": "changed",
        "c": "is gone",
        "d": "is new",
    }
