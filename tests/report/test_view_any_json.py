"""The viewer shows a run whose records hold a line of any JSON: it shows what is a record, and counts what is none."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_vlrl.report.record_schema import read_record
from npu_vlrl.report.verdicts import verdict_record
from npu_vlrl.report.view.page import head
from npu_vlrl.report.view.records import RunRecords
from npu_vlrl.types import Verdict
from tests.support.viewed import record_group, run_folder

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS | st.sampled_from([2**31, -1, 10**30, 1e308, "\ud800", "a" * 64, "__proto__"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


MISSING = "(missing)"


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = tmp_path_factory.mktemp("any") / "run"
    record_group(run_folder(run), 0, "step0.0/0/t/1")
    return (run / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()[0]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    run = tmp_path_factory.mktemp("any") / "run"
    record_group(run_folder(run), 0, "step0.0/0/t/1")
    return RunRecords(run)


def everything(records: RunRecords, added: str) -> list[str]:
    """All that the page is sent of the run and a line more, as a browser reads it."""
    file = records.folder / "trajectories.jsonl"
    before = file.read_bytes()
    try:
        file.write_bytes(before + added.encode() + b"\n")
        records.refresh()
        sent = [head(records), *(records.page(number) for number in range(records.n_pages))]
        return [json.dumps(value, allow_nan=False) for value in sent]
    finally:
        file.write_bytes(before)
        records._start()  # the line is gone again
        records.refresh()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value within `value`; of a list its first element stands for the others."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def changed(line: str, path: tuple[Any, ...], key: Any, value: Any) -> str:
    record = copy.deepcopy(json.loads(line))
    inner = record
    for step in path:
        inner = inner[step]
    if value is MISSING:
        del inner[key]
    else:
        inner[key] = value
    return json.dumps(record)


@pytest.mark.parametrize("value", [MISSING, None, [], {}, "", 0, -1, [[]], [0]], ids=repr)
def test_a_record_with_an_empty_value_anywhere(line: str, records: RunRecords, value: Any) -> None:
    for *path, key in [place for place in places(json.loads(line)) if place]:
        everything(records, changed(line, tuple(path), key, value))


@given(data=st.data())
def test_a_record_with_any_value_anywhere(line: str, records: RunRecords, data: st.DataObject) -> None:
    *path, key = data.draw(st.sampled_from([place for place in places(json.loads(line)) if place]))
    everything(records, changed(line, tuple(path), key, data.draw(st.just(MISSING) | VALUES)))


def test_whatever_is_written_is_read(line: str) -> None:
    """Keys that the schema does not name are dropped, so it must name each that is written."""
    verdict = Verdict(0.5, True, terms={"accuracy": 0.5, "strict": 0.0}, checks={"strict": False, "other": "it failed"})
    written = json.loads(line)
    written["turns"][0] |= {
        "verdict": verdict_record(verdict),
        "state": "a",
        "parsed": {"answer": "up", "thoughts": {"think": None}, "right": True},
        "judge_error": "it failed",
    }
    assert read_record(json.dumps(written).encode()) == written


@given(value=VALUES)
def test_any_value(records: RunRecords, value: Any) -> None:
    everything(records, json.dumps(value))


@pytest.mark.parametrize(
    ("written", "instead", "reason"),
    [
        ('"step": 0', '"step": 1e999', "too large a number"),
        ('"step": 0', '"step": "0"', "step: Input should be a valid integer"),
        ('"step": 0', '"step": NaN', "NaN is not JSON"),
        ('"turns": [', '"turns": [7, ', "turns.0: Input should be"),
        ('"grid": [1', '"grid": [0', "grid.0: Input should be greater than or equal to 1"),
        ('"id": "', '"id": 5, "x": "', "id: Input should be a valid string"),
        ('"text": "', '"text": [], "x": "', "text: Input should be a valid string"),
        ('"weight_versions": [', '"weight_versions": [1, ', "tokens and"),
        ('"name": "', '"name": null, "x": "', "name: Input should be a valid string"),
    ],
)
def test_a_line_that_is_no_record_is_counted(
    line: str, records: RunRecords, written: str, instead: str, reason: str
) -> None:
    broken = line.replace(written, instead, 1)
    assert broken != line
    with pytest.raises(ValueError, match=reason):
        read_record(broken.encode())
    first = json.loads(everything(records, broken)[0])
    assert (first["unreadable"], len(first["rows"])) == (1, 2)


def test_arguments_as_deep_as_json_goes(line: str, records: RunRecords) -> None:
    for depth in (10, 300, 900, 100_000):
        deep = line.replace('"arguments": {', '"arguments": {"a": ' + "[" * depth + "]" * depth + ", ", 1)
        first = json.loads(everything(records, deep)[0])
        assert (first["unreadable"], len(first["rows"])) in ((0, 3), (1, 2))
