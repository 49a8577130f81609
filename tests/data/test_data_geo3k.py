"""The real geometry problems, through parquet and back to tasks, judged by math-verify."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow.parquet as pq
import pytest
from math_verify import parse, verify

from npu_vlrl.data.records import load_tasks
from npu_vlrl.tasks.geo3k.data import INSTRUCTION, SAMPLE, convert
from npu_vlrl.types import DataError, Image, Task

PROBLEMS = {p["id"]: p for p in map(json.loads, (SAMPLE / "problems.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[str, Task]]:
    out = tmp_path_factory.mktemp("geo3k")
    report = convert(SAMPLE, out, eval_share=0.2, seed=0)
    tasks = {}
    for split in ("train", "test"):
        file = load_tasks(out / f"{split}.parquet")
        for k in range(len(file)):
            task = file[k]
            assert task.extra["split"] == split and task.id == f"{split}/{task.extra['id']}"
            tasks[task.extra["id"]] = task
    return report, tasks


def test_the_report_counts_every_row(converted: tuple[dict, dict[str, Task]]) -> None:
    report, tasks = converted
    assert set(report["refused"]) == {"mathv_2830", "mathverse_33", "mathv_2825"}
    assert "U+000C" in report["refused"]["mathv_2830"] and "not a single one" in report["refused"]["mathverse_33"]
    assert report["sources"] == {"geometry3k": 10, "math_vision": 38, "mathverse": 9}
    assert (report["train"], report["test"]) == (45, 12)  # a fifth of 10, 38 and 9: 2 + 8 + 2
    assert set(tasks) | set(report["refused"]) == set(PROBLEMS) and len(tasks) == 57
    held_out = Counter(task.data_source for task in tasks.values() if task.extra["split"] == "test")
    assert held_out == {"geometry3k": 2, "math_vision": 8, "mathverse": 2}


def test_answers_and_images_are_the_published_ones(converted: tuple[dict, dict[str, Task]]) -> None:
    modes: Counter[str] = Counter()
    for name, task in converted[1].items():
        problem = PROBLEMS[name]
        assert task.answer == problem["answer"]
        with PIL.Image.open(SAMPLE / problem["image"]) as pil:
            assert (task.extra["width"], task.extra["height"], task.extra["mode"]) == (*pil.size, pil.mode)
            modes[pil.mode] += 1
            if pil.mode == "RGB":
                assert task.images == (Image(np.array(pil)),)
            else:
                white = PIL.Image.new("RGBA", pil.size, "white")
                composed = np.asarray(PIL.Image.alpha_composite(white, pil).convert("RGB")).astype(int)
                assert np.abs(task.images[0].rgb - composed).max() <= 1
    assert modes == {"RGB": 46, "RGBA": 11}


def test_prompts(converted: tuple[dict, dict[str, Task]]) -> None:
    tasks = converted[1]
    for task in tasks.values():
        assert len(task.messages) == 1 and len(task.images) == 1
        assert "<image>" not in task.messages[0].text and task.messages[0].text.endswith(INSTRUCTION)
    first, text = tasks["geometry3k_11"].messages[0].parts
    assert isinstance(first, Image) and isinstance(text, str) and "The answer is one of: 30; 40; 60; 80." in text
    before, _, after = tasks["mathv_2795"].messages[0].parts  # the author's own place for the figure
    assert before == "Consider the figure " and str(after).startswith(", where every small triangle")
    assert "\n(B) $1.25 \\mathrm{~m}$\n" in tasks["mathv_804"].messages[0].text
    assert "Answer with the letter" in tasks["mathv_804"].messages[0].text
    assert "to scale.\nIn this figure" in tasks["mathv_2813"].messages[0].text
    assert not any("\\n" in task.messages[0].text for task in tasks.values())


def test_every_gold_that_was_kept_is_judged_right(converted: tuple[dict, dict[str, Task]]) -> None:
    for name, task in converted[1].items():
        gold = task.answer or ""
        parsed = parse(gold if gold.startswith("$") else f"${gold}$", parsing_timeout=None)
        right = parse("\\boxed{" + gold.strip("$") + "}", parsing_timeout=None)
        wrong = parse("\\boxed{77777}", parsing_timeout=None)
        assert verify(parsed, right, timeout_seconds=None), name
        assert not verify(parsed, wrong, timeout_seconds=None), name


def test_the_misread_gold_really_is_misread() -> None:
    gold = parse(PROBLEMS["mathv_2825"]["answer"], parsing_timeout=None)
    value = parse("\\boxed{\\frac{343}{692224}}", parsing_timeout=None)  # 7^3 / (2^12 * 13^2)
    assert 2**12 * 13**2 == 692224 and not verify(gold, value, timeout_seconds=None)


def test_the_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    def held_out(seed: int, folder: str, share: float = 0.2) -> list[str]:
        convert(SAMPLE, tmp_path / folder, share, seed)
        table = pq.read_table(tmp_path / folder / "test.parquet", columns=["extra_info"])
        return [extra["id"] for extra in table["extra_info"].to_pylist()]

    assert held_out(1, "a") == held_out(1, "b") != held_out(2, "c")
    assert held_out(1, "d", share=0.0) == []


def copy(tmp_path: Path, change: dict | None = None, remove: str = "") -> Path:
    source = tmp_path / "sample"
    (source / "images").mkdir(parents=True)
    problem = dict(PROBLEMS["geometry3k_11"])
    shutil.copy(SAMPLE / problem["image"], source / "images")
    problem |= change or {}
    problem.pop(remove, None)
    (source / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    return source


@pytest.mark.parametrize(
    ("change", "remove", "words"),
    [
        ({"answer": 80}, "", "problems.jsonl row 0, answer: expected a string, got 80"),
        ({}, "question", "row 0, question: expected a string, got None; restore"),
        ({"id": "other_1"}, "", "row 0, id: 'other_1' begins with none of"),
        ({"image": "images/gone.png"}, "", "row 0, image: there is no images/gone.png"),
        ({"image": "../../x.png"}, "", "row 0, image: there is no"),
    ],
)
def test_an_unusable_sample_is_refused(tmp_path: Path, change: dict, remove: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        convert(copy(tmp_path, change, remove), tmp_path / "out", 0.2, 0)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="problems.jsonl: there is no such file"):
        convert(tmp_path, tmp_path / "out", 0.2, 0)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="eval_share must be at least 0 and below 1"):
            convert(SAMPLE, tmp_path / "out", share, 0)


def test_a_control_character_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    report = convert(copy(tmp_path, {"answer": "5\x08eta"}), tmp_path / "out", 0.0, 0)
    assert report["refused"] == {"geometry3k_11": "the answer '5\\x08eta' contains the control character U+0008"}
    assert report["train"] == 0
    assert pq.read_table(tmp_path / "out" / "train.parquet").num_rows == 0
