"""Every command and snippet of the documents runs, but for those that say why they cannot run here."""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import yaml

from npu_vlrl.cli import _parse
from npu_vlrl.commands.options import load
from npu_vlrl.config import Config, load_config
from npu_vlrl.workflow.environments import environments
from tests.docs.markdown import DOCUMENTS, ROOT, Block, all_blocks, blocks, commands
from tests.support.program import program

BLOCKS = all_blocks()
NOT_RUN = {
    "CONTRIBUTING.md": 1,
    "README.md": 3,
    "docs/api.md": 1,
    "docs/ascend.md": 3,
    "docs/ascend_first_day.md": 1,
    "docs/asynchronous.md": 1,
    "docs/data.md": 1,
    "docs/evaluation.md": 2,
    "docs/export.md": 6,
    "docs/init.md": 3,
    "docs/learners.md": 1,
    "docs/quickstart-results.md": 1,
    "docs/ray.md": 2,
    "docs/view.md": 1,
    "docs/vllm.md": 3,
}
"""Blocks that say that they are not run. Whoever adds one counts it here, and gives its reason in the document."""

HAS = {"FILE": "configs/geo3k_tiny.yaml", "my.yaml": "configs/geo3k_tiny.yaml"}
"""What a reader has already, where the documents name it, and what stands for it here. A run is at RUNS, its model at
MODEL."""
RUNS = (
    *("RUN", "runs/mine", "runs/arrow_tiny", "runs/photo_tiny"),
    *("runs/lr3/seed0", "runs/lr3/seed1", "runs/lr4/seed0"),
)
MODEL = "MODEL"
SCRIPTS = ("launch/test.sh", "launch/install_npu.sh", "launch/check_requirements.sh", ".ci/run")
OTHERS = {"python", "python3.11", "pip", "export", "source", "ray", "grep", "eval", "lmms-eval"}
"""What else a block may start. Only `python FILE` is run."""
SMALL = (
    *("train.steps=1", "rollout.groups=2", "rollout.group_size=2", "evaluation.tasks=2"),
    *("workflow.turn_tokens=4", "workflow.max_turns=1", "run.show_every=0"),
)


def of(language: str, document: str | None = None) -> list[Block]:
    return [b for b in BLOCKS if b.language == language and document in (None, b.document)]


def ours(words: list[str]) -> list[str] | None:
    """The words for `npu-vlrl` in a command, however it is started; None where another program is."""
    if words[0] == "npu-vlrl":
        return words[1:]
    if "npu_vlrl" in words:
        return words[words.index("npu_vlrl") + 1 :]
    if words[0] == "bash" and re.fullmatch(r"launch/train_(cpu|gpu|npu)\.sh", words[1]):
        config = [] if "--config" in words else ["--config", "configs/photo_tiny.yaml"]
        return ["train", *config, *words[2:]]
    return None


def files_of(document: str) -> dict[str, str]:
    """Files that a document has its reader write: blocks whose first line is `# NAME.py`, or `# NAME.yaml: …`."""
    named = [b for b in (*of("python", document), *of("yaml", document)) if re.match(r"# [\w.]+\.(py|yaml)\b", b.text)]
    return {re.match(r"# ([\w.]+\.(?:py|yaml))", b.text)[1]: b.text for b in named}  # type: ignore[index]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: f.name)
def test_blocks_say_what_language_they_are_in(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    found = list(blocks(text, file.name))
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(found), (
        "a fence does not end, or not where it began"
    )
    assert {block.language for block in found} <= {"bash", "python", "yaml", "text"}


def test_what_is_not_run_is_counted() -> None:
    counted = Counter(block.document for block in BLOCKS if block.reason)
    assert dict(counted) == NOT_RUN
    assert markers() == sum(NOT_RUN.values()), "a marker stands on the line before its block"


def markers() -> int:
    texts = (file.read_text(encoding="utf-8") for file in DOCUMENTS)
    return sum(len(re.findall(r"^ *<!-- not run:", text, re.MULTILINE)) for text in texts)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory like a checkout, of somebody with photographs at home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    for name in ("configs", "examples", "npu_vlrl"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, target in HAS.items():
        (tmp_path / name).symlink_to(ROOT / target)
    (tmp_path / "Pictures").symlink_to(ROOT / "npu_vlrl" / "tasks" / "photos")
    return tmp_path


def write_files(document: str) -> None:
    """What a document has its reader write; the game of another one is what the tutorial asks for."""
    for name, text in ({"my_game.py": files_of("docs/environments.md")["my_game.py"]} | files_of(document)).items():
        Path(name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("block", of("bash"), ids=lambda b: b.name)
def test_commands_are_words_of_the_program(block: Block, checkout: Path) -> None:
    """Also those that are not run: their options and keys are real."""
    write_files(block.document)
    for words in commands(block.text):
        mine = ours([word for word in words if not word.startswith("$")])
        if mine is None:
            assert words[0].split("/")[-1] in OTHERS or (words[0] == "bash" and words[1] in SCRIPTS), words
        else:
            configured(_parse(mine))


def configured(options: argparse.Namespace) -> Config | None:
    """The configuration that a command names, checked; None where it names none."""
    if not getattr(options, "config", None):
        return None
    return load(options) if hasattr(options, "run_dir") else load_config(options.config, options.overrides)


def test_a_wrong_command_and_a_wrong_key_are_noticed(checkout: Path) -> None:
    for wrong in ("npu-vlrl trian --config FILE", "npu-vlrl train --config FILE train.stepz=1", "rm -r runs"):
        block = next(iter(blocks(f"```bash\n{wrong}\n```\n", "x.md")))
        with pytest.raises((SystemExit, ValueError, AssertionError)):
            test_commands_are_words_of_the_program(block, checkout)


def test_a_skipped_block_is_noticed() -> None:
    hidden, shown = blocks("<!-- not run: no -->\n```bash\nls\n```\n\n```bash\nls\n```\n", "x.md")
    assert (hidden.reason, shown.reason) == ("no", None)


@pytest.mark.parametrize("block", of("yaml"), ids=lambda b: b.name)
def test_fragments_are_configurations(block: Block) -> None:
    given = yaml.safe_load(block.text)
    game = given.get("environment", {}).get("name", "visual_qa")
    source = {"generator": "arrow" if game == "visual_qa" else "episodes"}
    config = Config.model_validate({"model": {"path": "tiny:qwen2_5_vl"}, "data": {"train": source}} | given)
    if game in ("sokoban", "frozenlake"):
        environments(config.environment)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step; beside it, `geo3k` is what the launch scripts make of the sample problems."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert program("data", "geo3k", "--out", folder.parent / "geo3k").code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_VLRL_PLATFORM", "cpu")
        words = [
            "train",
            "--config",
            ROOT / "configs/arrow_tiny.yaml",
            "--run-dir",
            folder,
            *SMALL,
            "warm_start.steps=0",
        ]
        assert program(*words).code == 0
    return folder


class Reader:
    """Somebody who does what a document says."""

    def __init__(self, document: str, patch: pytest.MonkeyPatch) -> None:
        self.document, self.patch = document, patch
        write_files(document)
        self.dialogues = [b.text for b in of("text", document) if "\n> " in f"\n{b.text}"]
        self.started: set[str] = set()

    def reads(self, block: Block) -> None:
        if block.reason is None and block.language == "bash":
            for words in commands(block.text):
                self.does(words)
        elif block.reason is None and block.language == "python" and not block.text.startswith("# "):
            Path("snippet.py").write_text(block.text, encoding="utf-8")
            runpy.run_path("snippet.py")

    def does(self, words: list[str]) -> None:
        mine = ours(words)
        if words[0] == "python" and mine is None:
            self.patch.setattr("sys.argv", words[1:])
            self.started.add(words[1])
            runpy.run_path(words[1], run_name="__main__")
        else:
            assert mine is not None, f"{self.document}: {words} is not run; say why with <!-- not run: … -->"
            self._starts([os.path.expanduser(word) for word in mine])

    def imports_the_rest(self) -> None:
        """Files that no command starts; they are rewards, tools, games."""
        for name in files_of(self.document):
            if name.endswith(".py") and name not in self.started:
                runpy.run_path(name)

    def _starts(self, words: list[str]) -> None:
        if words[0] == "play":
            self._plays(words)
            return
        small = self._small(_parse(words)) if words[0] in ("train", "eval") else []
        done = program(*words, *small)
        assert done.code == 0, (words, done.err)

    def _small(self, options: argparse.Namespace) -> list[str]:
        """Makes a training one of seconds, in a folder of its own unless it has one."""
        config = configured(options)
        if config is None:
            return []
        warm = ["warm_start.steps=1", "warm_start.batch=2"] if config.warm_start.steps else []
        own = [] if options.run_dir else [f"run.dir=runs/{len(list(Path().glob('runs/*')))}"]
        return [*SMALL, *warm, *own]

    def _plays(self, words: list[str]) -> None:
        """Types what the document shows, and compares what it shows with what comes."""
        shown = self.dialogues.pop(0) if self.dialogues else "> /quit\n"
        typed = re.findall(r"^> (.*)$", shown, re.MULTILINE)
        self.patch.setattr("sys.stdin", io.StringIO("\n".join(typed) + "\n"))
        done = program(*words)
        assert done.code == 0, (words, done.err)
        assert shown in done.out, f"{self.document} shows\n{shown}\nand this came\n{done.out}"


RUNNABLE = list(dict.fromkeys(b.document for b in (*of("bash"), *of("python")) if not b.reason))


@pytest.mark.parametrize("document", RUNNABLE)
def test_a_reader_can_do_what_a_document_says(
    document: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, finished_run: Path
) -> None:
    reader = Reader(document, monkeypatch)
    for name in RUNS:
        shutil.copytree(finished_run, checkout / name)
    (checkout / MODEL).symlink_to(finished_run / "export")
    shutil.copytree(finished_run.parent / "geo3k", checkout / "runs/data/geo3k")
    if document == "docs/data.md":
        Path("figures").mkdir()
        PIL.Image.fromarray(np.zeros((56, 56, 3), np.uint8)).save("figures/1.png")
        reader.does(["python", "my_data.py"])
        shutil.copy("my_train.parquet", "my_test.parquet")
    for block in BLOCKS:
        if block.document == document:
            reader.reads(block)
    reader.imports_the_rest()
    assert reader.dialogues == [], "the document shows a dialogue of a command that it does not name"


def test_a_dialogue_that_is_not_true_is_noticed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader("docs/play.md", monkeypatch)
    reader.dialogues = ["> /quit\nend: quit, turns 7\n"]
    with pytest.raises(AssertionError, match="turns 7"):
        reader.does(["npu-vlrl", "play", "--environment", "frozenlake"])


def test_a_command_that_nobody_runs_is_noticed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="is not run; say why"):
        Reader("docs/play.md", monkeypatch).does(["bash", "launch/test.sh"])
