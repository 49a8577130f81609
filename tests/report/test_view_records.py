"""Reading a run folder for the viewer: rows, pages, and files that are not as they should be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from npu_vlrl.config import ConfigError
from npu_vlrl.report.view.records import COLUMNS, PAGE, RunRecords
from tests.support.learning import tiny_folder
from tests.support.scripted import END, tokenizer
from tests.support.viewed import DRAW, SEEN, as_of_old, change_records, copied, failed, record_group, run_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewed") / "run"
    made = run_folder(folder)
    record_group(made, 0, "step0.0/0/t/1")
    record_group(made, 1, "step1.0/0/t/1")
    made.trajectories(1, [failed("step1.0/1/t/1")], {})
    return folder


def rows(records: RunRecords) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in records.rows]


def test_a_row_tells_what_a_list_needs(run: Path) -> None:
    first, second, _, _, last = rows(RunRecords(run))
    drawn = {path.stem for path in (run / "images").iterdir()} - {SEEN.hash}
    # what the second turn earned counts half
    assert first | {"reward": 0.125, "solved": False, "status": "max_turns", "first": False} == first
    assert second | {"reward": 0.625, "solved": True, "status": "solved", "first": True} == second
    assert {first["picture"]} == drawn and first["calls"] == 1 and first["stops"] == ["end_of_turn"]
    assert (first["phase"], first["step"], first["id"]) == ("step", 0, "step0.0/0/t/1/0")
    assert first["snippet"] == "<answer>down</answer>" and first["turns"] == 2
    assert last["error"] == "t/1: the prompt is too long" and (last["turns"], last["snippet"]) == (0, None)


def test_a_page_has_messages_where_the_model_saw_them(run: Path) -> None:
    records = RunRecords(run)
    page = records.page(0)
    assert [record["id"][-1] for record in page["records"]] == ["0", "1", "0", "1", "0"]
    first = page["records"][0]["turns"]
    system, user, asks = page["segments"][first[0]["context"][0]]
    assert [block["role"] for block in (system, user, asks)] == ["system", "user", "assistant"]
    assert user["pieces"][:4] == ["<|im_start|>", "user", "\n", "<|vision_start|>"] and user["pieces"][4] == 0
    assert "".join(user["pieces"][5:]) == f"<|vision_end|>Which way?{END}\n"
    image = tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert len(user["ids"]) == len(user["pieces"]) and user["ids"].count(image) == 1  # one for all its four
    assert user["images"] == [{"hash": SEEN.hash, "stored": (56, 56), "grid": [1, 4, 4], "tokens": 4, "seen": [56, 56]}]
    assert "".join(first[0]["pieces"]) == DRAW + END and len(first[0]["pieces"]) == len(first[0]["ids"])
    assert first[0]["advantage"] == 0.5 and first[1]["values"]["entropy"][:3] == [0.0, 0.1, 0.2]
    tail, tool = page["segments"][first[1]["context"][0]][:2]
    assert (tail["role"], tail["pieces"], tool["role"]) == (None, ["\n"], "user")
    assert [image["seen"] for image in tool["images"]] == [[56, 56]] and 0 in tool["pieces"]


def test_what_members_see_alike_is_there_once(run: Path) -> None:
    page = RunRecords(run).page(0)
    contexts = [turn["context"] for record in page["records"] for turn in record["turns"]]
    assert len(contexts) == 8 and len(page["segments"]) == 2


def test_pages_divide_the_rows(tmp_path: Path) -> None:
    made = run_folder(tmp_path / "r")
    made.trajectories(0, [failed(f"step0.0/{i}/t/1") for i in range(2 * PAGE + 1)], {})
    records = RunRecords(tmp_path / "r")
    assert [len(records.page(number)["records"]) for number in range(records.n_pages)] == [PAGE, PAGE, 1]
    for number in (-1, 3):
        with pytest.raises(IndexError):
            records.page(number)


def test_a_run_that_goes_on_and_one_that_repeats_steps(tmp_path: Path) -> None:
    made = run_folder(tmp_path / "r")
    record_group(made, 0, "step0.0/0/t/1")
    records = RunRecords(tmp_path / "r")
    with (tmp_path / "r" / "trajectories.jsonl").open("a") as file:
        file.write('{"step": 1, "id": "step1.0/0/t')
    records.refresh()
    assert len(records.rows) == 2 and records.unreadable == 0  # the line is still being written
    made.rewind(1)
    record_group(made, 1, "step1.0/0/t/1")
    records.refresh()
    assert [row["step"] for row in rows(records)] == [0, 0, 1, 1] and records.generation == 0
    made.rewind(0)
    record_group(made, 0, "step0.0/7/t/1", members=3)
    records.refresh()
    assert [row["group"] for row in rows(records)] == ["step0.0/7/t/1"] * 3 and records.generation == 1
    assert len(records.page(0)["records"]) == 3


def test_lines_that_are_no_record_are_counted(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "r")
    with (folder / "trajectories.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"step": 1}\n{"step": 2, "id": 3, "turns": [1]}\n7\n' + b"[" * 100_000 + b"\n")
    records = RunRecords(folder)
    assert len(records.rows) == 5 and records.unreadable == 6


def test_records_of_older_runs(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "r")
    change_records(folder, as_of_old)
    turn = RunRecords(folder).page(0)["records"][0]["turns"][0]
    assert set(turn["values"]) == {"logprobs", "weight_versions"} and turn["advantage"] == 0.5

    def older(record: dict[str, Any]) -> None:
        del record["advantages"], record["data_source"]
        for turn in record["turns"]:
            for key in ("parsed", "state", "judge_error", "tool_results", "continues"):
                del turn[key]

    change_records(folder, older)
    (folder / "config.yaml").write_text("workflow: {reward_mode: sum, turn_discount: 0.5, no_longer_known: 1}\n")
    records = RunRecords(folder)
    assert rows(records)[1]["reward"] == 0.625 and rows(records)[0]["source"] is None
    assert records.page(0)["records"][0]["turns"][0]["advantage"] is None
    (folder / "config.yaml").write_text("workflow: [")
    assert rows(RunRecords(folder))[1]["reward"] == 1.25  # by default the best turn, without discount


def test_without_tokenizer_or_images(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "r")
    (folder / "config.yaml").unlink()
    (folder / "images" / f"{SEEN.hash}.png").write_bytes(b"no picture")
    for file in (folder / "images").iterdir():
        if file.stem != SEEN.hash:
            file.unlink()
    records = RunRecords(folder)
    assert ["tokenizer" in note for note in records.notes] == [True, False] and "processor" in records.notes[1]
    page = records.page(0)
    turn = page["records"][0]["turns"][0]
    (block,) = page["segments"][turn["context"][0]]
    assert turn["pieces"] is None and turn["text"] == DRAW and block["pieces"] is None
    assert block["images"] == [{"hash": SEEN.hash, "stored": None, "grid": [1, 4, 4], "tokens": 4}]
    assert turn["tool_results"][0]["images"][0]["stored"] is None


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no trajectories\.jsonl; name the folder of a run whose run\.record"):
        RunRecords(tmp_path)


def test_what_a_comparison_lacks_is_looked_for_in_the_run_that_it_comes_from(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "compared")
    shutil.copytree(tiny_folder(), tmp_path / "evaluated" / "model" / "tiny")
    settings = {"model": {"path": "tiny:qwen2_5_vl"}, "run": {"dir": str(tmp_path / "evaluated")}}
    (folder / "config.yaml").write_text(json.dumps(settings))
    records = RunRecords(folder)
    assert records.notes == [] and records.page(0)["records"][0]["turns"][0]["pieces"]
