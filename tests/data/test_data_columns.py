"""Rows in other schemas than verl's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_vlrl.config import ColumnsConfig, ConfigError, load_config
from npu_vlrl.data.images import decode_image
from npu_vlrl.data.records import TaskFile, load_tasks
from npu_vlrl.types import DataError, Message
from tests.support.program import config_file, png, program

A, B = png(28, seed=1), png(56, seed=2)


def opened(folder: Path, rows: list[dict[str, Any]], **columns: Any) -> TaskFile:
    pq.write_table(pa.Table.from_pylist(rows), folder / "theirs.parquet")
    return load_tasks(folder / "theirs.parquet", columns=ColumnsConfig(**columns))


def hashes(message: Message) -> list[str]:
    return [part if isinstance(part, str) else part.hash for part in message.parts]


def test_a_problem_with_tags_as_easyr1_has_it(tmp_path: Path) -> None:
    row = {"images": [{"bytes": A}, {"bytes": B}], "problem": "See <image> and <image>: x?", "answer": "13"}
    (task,) = opened(tmp_path, [row], prompt="problem", answer="answer")
    (message,) = task.messages
    first, second = (decode_image(data, "").hash for data in (A, B))
    assert message.role == "user" and hashes(message) == ["See ", first, " and ", second, ": x?"]
    assert (task.answer, task.data_source, task.id) == ("13", "theirs", "theirs/0")


def test_one_image_and_a_question_without_tags(tmp_path: Path) -> None:
    row = {"image": {"bytes": A}, "question": "How many?", "label": 4, "data_source": "counting"}
    (task,) = opened(tmp_path, [row], prompt="question", images="image", answer="label")
    (message,) = task.messages
    assert hashes(message) == [decode_image(A, "").hash, "How many?"]
    assert (task.answer, task.data_source) == ("4", "counting")


def test_messages_without_tags_get_images_after_the_system(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which?"}]
    row = {"chat": said, "images": [{"bytes": A}, {"bytes": B}], "reward_model": {"ground_truth": "up"}}
    (task,) = opened(tmp_path, [row], prompt="chat")
    assert [len(message.images) for message in task.messages] == [0, 2]
    assert task.messages[1].parts[2] == "Which?" and task.answer == "up"


def test_without_images(tmp_path: Path) -> None:
    (task,) = opened(tmp_path, [{"problem": "1 + 1?", "answer": 2}], prompt="problem", answer="answer")
    assert task.messages == (Message("user", ("1 + 1?",)),) and task.answer == "2"


def test_some_rows_have_no_image(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": A}, "question": "?", "label": 1}, {"image": None, "question": "1 + 1?", "label": 2}]
    first, second = opened(tmp_path, rows, prompt="question", images="image", answer="label")
    assert len(first.images) == 1 and second.messages == (Message("user", ("1 + 1?",)),)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chat": 5}, "prompt: expected list, got int 5"),
        ({"chat": ["?"]}, r"prompt\[0\]: expected dict, got str"),
        ({"images": "x.png"}, "images: expected list, got str"),
    ],
)
def test_what_is_in_a_column_is_checked_as_ever(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    row = {"chat": [{"role": "user", "content": "?"}], "images": [{"bytes": A}], "reward_model": {"ground_truth": "up"}}
    (tasks,) = [opened(tmp_path, [row | changes], prompt="chat")]
    with pytest.raises(DataError, match=f"theirs.parquet row 0, {reason}"):
        tasks[0]


@pytest.mark.parametrize("key", ["prompt", "images", "answer"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, key: str) -> None:
    rows = [{"image": {"bytes": A}, "question": "?", "label": "4"}]
    columns = {"prompt": "question", "images": "image", "answer": "label"} | {key: "typo"}
    tasks = opened(tmp_path, rows, **columns)
    with pytest.raises(DataError, match=rf"row 0, typo: missing, and columns\.{key} names it; it has image, quest"):
        tasks[0]


def test_a_generator_has_no_columns(tmp_path: Path) -> None:
    file = config_file(tmp_path, data={"train": {"generator": "photo", "columns": {"prompt": "x"}}})
    with pytest.raises(ConfigError, match="a generator has none; remove them"):
        load_config(file)


def test_a_training_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")
    opened(tmp_path, [{"image": {"bytes": A}, "question": "Which way?", "label": "up"}] * 4, prompt="question")
    columns = {"prompt": "question", "images": "image", "answer": "label"}
    source = {"path": str(tmp_path / "theirs.parquet"), "columns": columns}
    found = program("data", "check", "--config", config_file(tmp_path, data={"train": source}), "reward.rule=tagged")
    assert (found.code, found.err) == (0, "")
    assert "theirs.parquet): 4 rows, 4 usable" in found.out and "kinds: theirs 4" in found.out
