"""Published benchmarks in the formats they are published in, with rows written for the purpose."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_vlrl.data.records import load_tasks
from npu_vlrl.tasks.benchmark.command import BENCHMARKS as NAMES
from npu_vlrl.tasks.benchmark.convert import BENCHMARKS, convert
from npu_vlrl.tasks.benchmark.reward import _RULES
from npu_vlrl.types import DataError, Task
from tests.support.program import png, program

MATHVISTA = {
    "pid": "7",
    "question": "How long?",
    "image": "images/7.png",
    "choices": ["12 cm", "15 cm"],
    "unit": None,
    "precision": None,
    "answer": "15 cm",
    "question_type": "multi_choice",
    "answer_type": "text",
    "metadata": {"context": "geometry diagram", "task": "geometry problem solving"},
    "query": "Hint: Give the letter.\nQuestion: How long?\nChoices:\n(A) 12 cm\n(B) 15 cm",
}
MATHVERSE = {
    "sample_index": "3",
    "problem_index": "1",
    "problem_version": "Vision Only",
    "question": "",
    "image": {"bytes": png(seed=3), "path": None},
    "answer": "C",
    "question_type": "multi-choice",
    "query_cot": "Reason, then give the letter.",
    "metadata": {"subject": "Plane Geometry"},
}
CHARTQA = {
    "question": "Which is the highest?",
    "answer": "14",
    "type": "human_test",
    "image": {"bytes": png(), "path": None},
}
MME = {
    "question_id": "OCR/1.jpg",
    "image": {"bytes": png(), "path": "1.jpg"},
    "question": "Is it a dog? Please answer yes or no.",
    "answer": "Yes",
    "category": "OCR",
}
MMSTAR = {
    "index": 4,
    "question": "Which?\nOptions: A: red, B: blue, C: green, D: none",
    "image": png(),
    "answer": "B",
    "category": "math",
}
AIME = {"id": 60, "problem": "Find x.", "answer": "025", "year": "2024"}
MATH500 = {
    "problem": "Find $y$.",
    "answer": "\\frac{1}{2}",
    "subject": "Algebra",
    "level": 2,
    "unique_id": "test/a/1.json",
}
GPQA = {
    "Record ID": "rec1",
    "Question": "Which one?",
    "Correct Answer": "right",
    "Incorrect Answer 1": "wrong 1",
    "Incorrect Answer 2": "wrong 2",
    "Incorrect Answer 3": "wrong 3",
    "High-level domain": "Physics",
}


def made(folder: Path, name: str, rows: list[dict[str, Any]], seed: int = 0) -> list[Task]:
    """The tasks of rows that are published as parquet."""
    source = folder / "published.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    return converted(folder, name, source, seed=seed)


def converted(folder: Path, name: str, source: Path, images: Path | None = None, seed: int = 0) -> list[Task]:
    file, count = convert(name, source, folder / "out", images, seed)
    assert file == folder / "out" / f"{name}.parquet"
    assert {other.suffix for other in file.parent.iterdir()} == {".parquet"}
    tasks = load_tasks(file)
    assert len(tasks) == count
    return [tasks[row] for row in range(count)]


def test_every_benchmark_has_a_name_an_adapter_and_a_rule() -> None:
    assert set(NAMES) == set(BENCHMARKS) == set(_RULES)


def test_mathvista_as_parquet_and_as_json_with_image_files(tmp_path: Path) -> None:
    decoded = {**MATHVISTA, "decoded_image": {"bytes": png(seed=7), "path": None}}
    (task,) = made(tmp_path, "mathvista", [decoded])
    assert (task.id, task.answer, task.data_source) == ("mathvista/7", "15 cm", "mathvista")
    assert task.messages[0].text == f"{MATHVISTA['query']}\nPut the final answer in \\boxed{{}}."
    assert task.messages[0].parts[0] == task.images[0]
    assert task.extra == {
        "id": "7",
        "benchmark": "mathvista",
        "category": "geometry problem solving",
        "image_type": "geometry diagram",
        "question_type": "multi_choice",
        "answer_type": "text",
        "precision": 0,
        "choices": ["12 cm", "15 cm"],
    }
    (tmp_path / "json" / "images").mkdir(parents=True)
    (tmp_path / "json" / "images" / "7.png").write_bytes(png(seed=7))
    source = tmp_path / "json" / "testmini.json"
    source.write_text(json.dumps({"7": MATHVISTA}))
    assert converted(tmp_path, "mathvista", source) == [task]
    elsewhere = tmp_path / "elsewhere.json"
    source.rename(elsewhere)
    assert converted(tmp_path, "mathvista", elsewhere, images=tmp_path / "json") == [task]
    with pytest.raises(DataError, match=r"elsewhere\.json entry 7, image: there is no images/7\.png in .*--images"):
        convert("mathvista", elsewhere, tmp_path / "out", None, 0)


def test_mathverse_with_and_without_a_diagram(tmp_path: Path) -> None:
    text_only = {**MATHVERSE, "sample_index": "4", "problem_version": "Text Only", "image": None}
    seen, read = made(tmp_path, "mathverse", [MATHVERSE, text_only])
    assert seen.messages[0].text == "Reason, then give the letter.\nPut the final answer in \\boxed{}."
    assert (seen.answer, len(seen.images), seen.extra["image_type"]) == ("C", 1, "diagram")
    assert (seen.extra["category"], seen.extra["question_type"]) == ("Vision Only", "multi-choice")
    assert (read.id, read.images) == ("mathverse/4", ()) and "image_type" not in read.extra


def test_chartqa_in_its_three_formats(tmp_path: Path) -> None:
    (task,) = made(tmp_path, "chartqa", [CHARTQA])
    assert task.messages[0].text == "Which is the highest?\nAnswer with a single word or number in \\boxed{}."
    assert (task.answer, task.extra["category"], task.extra["image_type"]) == ("14", "human", "chart")
    hub = {"image": {"bytes": png(), "path": None}, "query": "How many?", "label": ["3"], "human_or_machine": 1}
    (task,) = made(tmp_path, "chartqa", [hub])
    assert (task.answer, task.extra["category"]) == ("3", "augmented")
    (tmp_path / "png").mkdir()
    (tmp_path / "png" / "a.png").write_bytes(png())
    original = tmp_path / "test_augmented.json"
    original.write_text(json.dumps([{"imgname": "a.png", "query": "How many?", "label": 4}]))
    (task,) = converted(tmp_path, "chartqa", original, images=tmp_path / "png")
    assert (task.answer, task.extra["category"]) == ("4", "augmented")


def test_mme_keeps_its_question_and_knows_the_image(tmp_path: Path) -> None:
    one, two = made(tmp_path, "mme", [MME, {**MME, "question": "Is it a cat?", "answer": "No"}])
    assert one.messages[0].text == MME["question"]
    assert (one.id, two.id) == ("mme/OCR/OCR/1.jpg/0", "mme/OCR/OCR/1.jpg/1")
    assert one.extra["picture"] == two.extra["picture"] == "OCR/OCR/1.jpg"
    assert (one.answer, two.answer, one.extra["category"]) == ("Yes", "No", "OCR")


def test_mmstar_aime_and_math500(tmp_path: Path) -> None:
    (task,) = made(tmp_path, "mmstar", [MMSTAR])
    assert task.messages[0].text.endswith("D: none\nPut the letter of the right option in \\boxed{}.")
    assert (task.id, task.answer, task.extra["category"], len(task.images)) == ("mmstar/4", "B", "math", 1)
    (task,) = made(tmp_path, "aime", [AIME])
    assert (task.id, task.answer, task.extra["category"], task.images) == ("aime/60", "25", "2024", ())
    (task,) = made(tmp_path, "aime", [{"ID": "2024-I-4", "Problem": "Find x.", "Answer": 204}])
    assert (task.id, task.answer) == ("aime/2024-I-4", "204")
    # pandas makes floats of whole numbers where some are missing
    (task,) = made(tmp_path, "aime", [{"id": 7.0, "problem": "Find x.", "answer": 204.0, "year": 2024.0}])
    assert (task.id, task.answer, task.extra["category"]) == ("aime/7", "204", "2024")
    lines = tmp_path / "aime2025.jsonl"
    lines.write_text('{"question": "Find z.", "answer": "70"}\n')
    (task,) = converted(tmp_path, "aime", lines)
    assert (task.id, task.answer) == ("aime/0", "70")
    (task,) = made(tmp_path, "math500", [MATH500])
    assert (task.id, task.answer) == ("math500/test/a/1.json", "\\frac{1}{2}")
    assert task.messages[0].text == "Find $y$.\nPut the final answer in \\boxed{}."


def test_gpqa_shuffles_by_the_seed_and_records_how(tmp_path: Path) -> None:
    source = tmp_path / "gpqa_diamond.csv"
    rows = [{**GPQA, "Record ID": f"rec{n}"} for n in range(20)]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, GPQA)
        writer.writeheader()
        writer.writerows(rows)
    tasks = converted(tmp_path, "gpqa", source)
    answers = ["right", "wrong 1", "wrong 2", "wrong 3"]
    for task in tasks:
        options = task.messages[0].text.split("\n")[3:7]
        order = task.extra["order"]
        assert options == [f"({'ABCD'[k]}) {answers[which]}" for k, which in enumerate(order)]
        assert options["ABCD".index(task.answer or "")].endswith(" right") and sorted(order) == [0, 1, 2, 3]
    assert {task.answer for task in tasks} == set("ABCD")
    assert converted(tmp_path, "gpqa", source) == tasks
    other = converted(tmp_path, "gpqa", source, seed=1)
    assert [t.extra["order"] for t in other] != [t.extra["order"] for t in tasks]


def test_an_image_tag_in_a_question_is_no_image(tmp_path: Path) -> None:
    (task,) = made(tmp_path, "mmstar", [{**MMSTAR, "question": "<image>Which?"}])
    assert len(task.images) == 1 and task.messages[0].text.startswith("Which?")


def test_a_folder_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for part in (1, 0):
        rows = [{**AIME, "id": f"{part}-{n}"} for n in range(2)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"test-0000{part}.parquet")
    tasks = converted(tmp_path, "aime", folder)
    assert [task.id for task in tasks] == ["aime/0-0", "aime/0-1", "aime/1-0", "aime/1-1"]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mathvista", {**MATHVISTA, "answer": "13 cm"}, "row 0, answer: '13 cm' is none of the choices"),
        ("mathvista", {**MATHVISTA, "question_type": "essay"}, "'essay' is neither multi_choice nor free_form"),
        ("mathverse", {**MATHVERSE, "image": None}, "row 0: there is no image in image"),
        ("mathverse", {**MATHVERSE, "question_type": "x"}, "'x' is neither multi-choice nor free-form"),
        ("chartqa", {**CHARTQA, "type": None}, "who asked, human or augmented"),
        ("chartqa", {**CHARTQA, "answer": None}, "row 0, answer: expected a text or a list of one, got None"),
        ("mme", {**MME, "answer": "maybe"}, "'maybe' is neither Yes nor No"),
        ("mme", {**MME, "image": {"bytes": b"x", "path": None}}, "row 0, image: not an image that can be read"),
        ("mmstar", {**MMSTAR, "answer": "E"}, "'E' is no letter from A to D"),
        ("aime", {**AIME, "answer": "1000"}, "'1000' is no whole number from 0 to 999"),
        ("math500", {"answer": "1"}, r"row 0: expected a text in problem, got None; get the benchmark again"),
        ("gpqa", {**GPQA, "Incorrect Answer 2": None}, "expected a text in Incorrect Answer 2"),
    ],
)
def test_a_row_that_is_not_as_published_is_refused(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        made(tmp_path, name, [row])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.json", "{", "cannot be read as JSON"),
        ("a.json", "[1]", "a.json entry 0: expected an object, got 1"),
        ("a.json", "3", "there are no rows in it"),
        ("a.csv", "Question\n", "there are no rows in it"),
        ("a.txt", "", "unknown kind of file"),
    ],
)
def test_a_file_that_is_not_one_is_refused(tmp_path: Path, file: str, text: str, message: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message):
        convert("aime", tmp_path / file, tmp_path / "out", None, 0)
    with pytest.raises(DataError, match="there is no .parquet, .jsonl, .json, .csv file in it"):
        convert("aime", tmp_path / "out", tmp_path / "out", None, 0)


def test_the_command(tmp_path: Path) -> None:
    source = tmp_path / "aime.jsonl"
    source.write_text(json.dumps(AIME) + "\n")
    done = program("data", "benchmark", "aime", "--source", source, "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{tmp_path / 'out' / 'aime.parquet'}: 1 rows; judge them with reward.rule=benchmark\n"
    refused = program("data", "benchmark", "vqa", "--source", source, "--out", tmp_path / "out").refused()
    assert refused.startswith("there is no benchmark 'vqa'; choose one of mathvista,")
    refused = program("data", "benchmark", "aime", "--source", tmp_path / "no.csv", "--out", tmp_path / "o").refused()
    assert "there is no such file or folder" in refused
    (tmp_path / "file").write_text("")
    assert "--out: " in program("data", "benchmark", "aime", "--source", source, "--out", tmp_path / "file").refused()
