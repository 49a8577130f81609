"""What the documents and sample configurations say is there."""

from __future__ import annotations

import argparse
import asyncio
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from npu_vlrl.cli import _parser, main
from npu_vlrl.config import ConfigError, load_config
from npu_vlrl.data.records import load_tasks
from npu_vlrl.types import Image, Message, Task, ToolCall
from npu_vlrl.workflow.rewards import make_judge
from npu_vlrl.workflow.tools import Toolbox, ToolContext

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(parser: argparse.ArgumentParser, prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Every command of the command line, e.g. ("data", "geo3k")."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        return {prefix}
    return {found for name, child in nested[0].choices.items() for found in commands(child, (*prefix, name))}


def documented(text: str) -> set[tuple[str, ...]]:
    """The words after `npu-vlrl` in code blocks and code spans, up to the first option or placeholder."""
    found = set()
    for words in re.findall(r"(?:npu-vlrl|python -m npu_vlrl)((?: [a-z0-9]+)+)(?=[ `\n])", text):
        found.add(tuple(words.split()))
    return found


def mentioned_files(text: str) -> set[str]:
    """Paths of the repository that a text names: scripts, configurations, documents, tests, examples."""
    return set(re.findall(r"(?<![\w/.-])((?:launch|configs|docs|examples|npu_vlrl|tests)/[\w/.-]*\w)", text))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.name)
def test_sample_configurations_load(file: Path) -> None:
    config = load_config(file)
    assert config.train.steps > 0 and file.read_text().startswith("#"), "a sample says first what it is"


def test_there_are_sample_configurations_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    assert {"photo_tiny.yaml", "arrow_tiny.yaml", "geo3k_tiny.yaml"} <= {file.name for file in CONFIGS}
    broken = tmp_path / "broken.yaml"
    broken.write_text(CONFIGS[0].read_text().replace("train:\n  steps", "train:\n  stepz", 1))
    with pytest.raises(ConfigError, match=r"train\.stepz: unknown key; did you mean train\.steps"):
        load_config(broken)


@pytest.mark.parametrize("words", sorted(commands(_parser())), ids=" ".join)
def test_every_command_explains_itself_and_is_in_the_readme(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert f"usage: npu-vlrl {' '.join(words)}" in capsys.readouterr().out
    assert words in documented((ROOT / "README.md").read_text())


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: f.name)
def test_documented_commands_and_files_exist(file: Path) -> None:
    text = file.read_text()
    known = commands(_parser())
    prefixes = {words[:n] for words in known for n in range(1, len(words) + 1)}
    assert documented(text) - prefixes == set()
    if file.name != "comparison.md":  # it names files of other projects
        assert sorted(path for path in mentioned_files(text) if not (ROOT / path).exists()) == []


def test_a_wrong_command_or_file_would_be_found() -> None:
    text = (
        "Run `npu-vlrl trian --config x` or\nbash launch/train_tpu.sh, see docs/x.md.\n  npu-vlrl data geo3k --out d\n"
    )
    assert documented(text) == {("trian",), ("data", "geo3k")}
    assert mentioned_files(text) == {"launch/train_tpu.sh", "docs/x.md"}


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the Python files of documents, each of which begins with its name; it is the working directory."""
    for document in ("data", "rewards", "tools"):
        text = (ROOT / "docs" / f"{document}.md").read_text()
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_data_example_makes_a_task(examples: Path) -> None:
    (examples / "figures").mkdir()
    Pillow.new("RGB", (40, 30), "white").save(examples / "figures" / "1.png")
    runpy.run_path("my_data.py")
    tasks = load_tasks(examples / "my_train.parquet")
    assert len(tasks) == 1
    task = tasks[0]
    assert (task.id, task.answer, task.data_source) == ("my_train/1", "13", "my_geometry")
    assert [image.size for image in task.images] == [(40, 30)]
    assert task.messages[0].text == "Find x. Put the answer in \\boxed{}."


def test_the_reward_example_judges(examples: Path) -> None:
    task = Task("t", (Message("user", ("Find x.",)),), "13 cm", "mine")
    judge = make_judge("my_reward.py:score", {}, workers=1, deadline_s=60)
    try:
        right, wrong = (asyncio.run(judge.judge(task, text, ())) for text in ("It is 13 cm ", "It is 13"))
    finally:
        judge.close()
    assert (right.reward, right.solved, right.feedback) == (1.0, True, None)
    assert (wrong.reward, wrong.solved, wrong.feedback) == (0.0, False, "Check the units.")


def test_the_tool_example_tells_the_brightness(examples: Path) -> None:
    image = Image(np.repeat(np.arange(4, dtype=np.uint8) * 10, 3).reshape(2, 2, 3))
    task = Task("t", (Message("user", (image, "What is it?")),), "1", "mine")
    toolbox = Toolbox(["my_tools.py:brightness", "rotate"])
    try:
        result = toolbox.run(ToolCall("brightness", {"bbox": [1, 0, 2, 2]}), ToolContext(task, task.images))
    finally:
        toolbox.close()
    assert (result.text, result.error) == ("20", False), "the mean of 10 and 30"
    assert [s["function"]["name"] for s in toolbox.schemas()] == ["brightness", "rotate"]
