"""Columns of files: those that tasks are made of keep their values, the others are counted and cannot do harm."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_vlrl.config import ColumnsConfig
from npu_vlrl.data.files import read_records
from npu_vlrl.data.records import load_tasks
from npu_vlrl.data.source import TaskSource
from npu_vlrl.types import DataError

VERL: dict[str, Any] = {
    "data_source": ["x", "x"],
    "prompt": [[{"role": "user", "content": "q"}]] * 2,
    "reward_model": [{"style": "rule", "ground_truth": gold} for gold in ("5", "6")],
}
ODD = {
    "date": pa.array([1, 10**8], pa.int32()).cast(pa.date32()),
    "nanoseconds": pa.array([1, 1_700_000_000_000_000_001], pa.timestamp("ns")),
    "far": pa.array([None, 2**60], pa.timestamp("ms", "UTC")),
    "duration": pa.array([1, 2**62], pa.duration("ns")),
    "time": pa.array([1, 2], pa.time64("ns")),
    "raw": pa.array([b"\xff", b""]),
    "money": pa.array([Decimal("1.50"), None]),
}


def saved(folder: Path, table: pa.Table, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(table, folder / "t.parquet")
        return folder / "t.parquet"
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    return folder


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_column_that_nothing_uses_cannot_end_a_run(kind: str, tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    odd = {**ODD, "broken": broken} if kind == "folder" else ODD
    source = TaskSource.from_records(saved(tmp_path, pa.table({**VERL, **odd}), kind), seed=0)
    assert sorted(task.answer or "" for task in source.next(2)) == ["5", "6"] and not source.skipped
    counts = {name: 2 - column.null_count for name, column in odd.items()}
    assert source.unused(2) == {**counts, "reward_model.style": 2}


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_what_judges_get_is_whole(kind: str, tmp_path: Path) -> None:
    fields = pa.StructArray.from_arrays([*ODD.values(), pa.array([0.1, 0.2], pa.float32())], [*ODD, "small"])
    first, second = load_tasks(saved(tmp_path, pa.table({**VERL, "extra_info": fields}), kind))
    assert json.loads(json.dumps(dict(first.extra))) == {
        "date": "1970-01-02",
        "nanoseconds": "1970-01-01 00:00:00.000000001",
        "duration": "1 ns",
        "time": "00:00:00.000000001",
        "raw": "/w==",
        "money": "1.50",
        "small": 0.1,
    }
    assert second.extra["date"] == "100000000 day since 1970-01-01" and second.extra["raw"] == ""
    assert second.extra["far"] == f"{2**60} ms since 1970-01-01" and second.extra["small"] == 0.2


@pytest.mark.parametrize(
    ("golds", "answers"),
    [
        (pa.array([5.0, 1e-05]), ["5", "0.00001"]),
        (pa.array([0.1, 2.5], pa.float32()), ["0.1", "2.5"]),
        (pa.array([Decimal("5.00"), Decimal("0.10")]), ["5", "0.1"]),
        (pa.array([2**63, 1], pa.uint64()), [str(2**63), "1"]),
        (pa.array(["up", "down"]).dictionary_encode(), ["up", "down"]),
    ],
)
def test_numbers_of_tables_as_golds(golds: pa.Array, answers: list[str], tmp_path: Path) -> None:
    models = pa.StructArray.from_arrays([golds], ["ground_truth"])
    path = saved(tmp_path, pa.table({**VERL, "reward_model": models}), "parquet")
    assert [task.answer for task in load_tasks(path)] == answers
    path = saved(tmp_path, pa.table({"question": ["a", "b"], "label": golds}), "parquet")
    tasks = load_tasks(path, columns=ColumnsConfig(prompt="question", answer="label"))
    assert [task.answer for task in tasks] == answers


def test_a_gold_is_no_date_and_no_nan(tmp_path: Path) -> None:
    columns = ColumnsConfig(prompt="question", answer="label")
    for label, words in (
        (ODD["date"], "got a date or time; change its type"),
        (pa.array([float("nan"), float("inf")]), "not finite; correct the answer"),
        (pa.array([True, False]), "got bool"),
        (pa.array([b"5", b"6"]), "got bytes"),
    ):
        tasks = load_tasks(
            saved(tmp_path, pa.table({"question": ["a", "b"], "label": label}), "parquet"), None, columns
        )
        for row in (0, 1):
            with pytest.raises(DataError, match=f"t.parquet row {row}, reward_model.ground_truth: .*{words}"):
                tasks[row]


def test_columns_beside_those_that_are_named_are_counted(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "label": 1, "prompt": "old", "reward_model": {"style": "rule", "ground_truth": "2"}},
        {"question": "b", "label": 2, "prompt": None, "note": ""},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    columns = ColumnsConfig(prompt="question", answer="label")
    source = TaskSource.from_records(path, seed=0, columns=columns)
    assert [task.answer for task in source.all()] == ["1", "2"]
    assert source.unused(2) == {"prompt": 1, "reward_model": 1, "note": 1}


def test_rows_for_verls_agent_loops_are_used_and_what_only_those_obey_is_counted(tmp_path: Path) -> None:
    """Rows as verl's examples of tools and interactions for GSM8K make them."""
    agent = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "How many?", "ground_truth": "72"},
    }
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "How many?"}],
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": index, "answer": "…#### 72", **extra},
        }
        for index, extra in enumerate([agent, agent | {"need_tools_kwargs": False, "tools_kwargs": None}])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    source = TaskSource.from_records(tmp_path / "t.parquet", seed=0)
    first, second = source.all()
    assert first.answer == second.answer == "72"
    assert {key: first.extra[key] for key in agent} == agent  # tools and rewards may read it
    settings = {"need_tools_kwargs": 1, "tools_kwargs": 1, "interaction_kwargs": 2}
    assert source.unused(2) == {"reward_model.style": 2, **{f"extra_info.{key}": n for key, n in settings.items()}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_parts_without_an_effect_are_refused_in_any_schema(kind: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "up"}]
    row: dict[str, Any] = {"chat": chat, "label": "up", "tools": None}
    for changes, words in (
        ({}, r"prompt\[1\]: the prompt ends with a message of the assistant"),
        ({"chat": [chat[0] | {"name": "Ann"}]}, r"prompt\[0\].name: nothing uses it"),
        ({"chat": "?", "tools": ["x"]}, "tools: a row brings no tools"),
        ({"chat": "?", "image": "a.png"}, "image: nothing uses it, so the model would be blind"),
    ):
        path = tmp_path / f"t.{kind}"
        if kind == "jsonl":
            path.write_text(json.dumps(row | changes))
        else:
            pq.write_table(pa.Table.from_pylist([row | changes]), path)
        tasks = load_tasks(path, columns=ColumnsConfig(prompt="chat", answer="label"))
        with pytest.raises(DataError, match=f"row 0, {words}"):
            tasks[0]


def test_names_that_are_not_unique(tmp_path: Path) -> None:
    table = pa.table([[1], [2], ["x"]], names=["a", "a", "b"])
    records = read_records(saved(tmp_path, table, "folder"))
    assert records[0]["b"] == "x"
    with pytest.raises(DataError, match="row 0, a: 2 columns have this name; rename all but one"):
        records[0]["a"]
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n{"a": 1, "a": 2}\n')
    with pytest.raises(
        DataError, match="t.jsonl row 1: the row cannot be read .the key 'a' stands twice in one object"
    ):
        read_records(path)[1]
