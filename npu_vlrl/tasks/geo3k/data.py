"""Writes the 60 geometry problems of `SAMPLE` as parquet in verl's schema.

Answers stay as published, because math-verify judges them as they are. Where the published answer is the letter of a
choice (MATH-Vision), the choices are lettered and the letter is asked for; where it is a value (Geometry3K), the
choices are listed without letters and the value is asked for. Rows are refused, by name, when the answer was damaged,
when it is not a single one, or when math-verify is known to misread it.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from npu_vlrl.data.columns import IMAGE_TAG
from npu_vlrl.data.files import read_records
from npu_vlrl.data.records import control_character, written_schema
from npu_vlrl.types import DataError

SAMPLE = Path(__file__).parent / "sample"
"""Folder of problems.jsonl, images/, and LICENSES/ of both."""

INSTRUCTION = "Think step by step and put the final answer in \\boxed{}."

ORIGINS = {"geometry3k": "geometry3k", "mathv": "math_vision", "mathverse": "mathverse"}
"""Data source by the beginning of a row's id."""

MISREAD = {"mathv_2825": "math-verify takes `2^{12} 13^2` for 2^12 * 1 * 3^2, so the right answer would score 0"}

SCHEMA = written_schema(
    {"id": pa.string(), "split": pa.string(), "mode": pa.string(), "width": pa.int32(), "height": pa.int32()}
)


def convert(source: Path, out: Path, eval_share: float, seed: int) -> dict[str, Any]:
    """Writes out/train.parquet and out/test.parquet from source/problems.jsonl.

    `eval_share` of each origin goes to the test file, drawn by `seed`. Returns {"train": rows, "test": rows,
    "sources": {data_source: rows}, "refused": {id: reason}}. Raises DataError for an unusable source folder, and
    ValueError when `eval_share` is not at least 0 and below 1.
    """
    if not 0 <= eval_share < 1:
        raise ValueError(f"eval_share must be at least 0 and below 1, got {eval_share}")
    problems = read_records(source / "problems.jsonl")
    refused: dict[str, str] = {}
    by_source: dict[str, list[dict[str, Any]]] = {}
    for number in range(len(problems)):
        problem = problems[number]
        _check_fields(problem, problems.where(number))
        if reason := _refusal(problem):
            refused[problem["id"]] = reason
        else:
            row = _row(problem, source, problems.where(number))
            by_source.setdefault(row["data_source"], []).append(row)
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for name, rows in by_source.items():
        order = list(range(len(rows)))
        random.Random(f"{seed}/{name}").shuffle(order)
        held_out = set(order[: round(eval_share * len(rows))])
        for index, row in enumerate(rows):
            split = "test" if index in held_out else "train"
            row["extra_info"]["split"] = split
            splits[split].append(row)
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), out / f"{split}.parquet", row_group_size=64)
    counts = {split: len(rows) for split, rows in splits.items()}
    return counts | {"sources": {name: len(rows) for name, rows in by_source.items()}, "refused": refused}


def _check_fields(problem: Mapping[str, Any], where: str) -> None:
    for field in ("id", "question", "answer", "image"):
        if not isinstance(problem.get(field), str):
            raise DataError(f"{where}, {field}: expected a string, got {problem.get(field)!r}; restore the sample")
    if problem["id"].split("_")[0] not in ORIGINS:
        raise DataError(f"{where}, id: {problem['id']!r} begins with none of {', '.join(ORIGINS)}; restore the sample")


def _refusal(problem: Mapping[str, Any]) -> str | None:
    if found := control_character(problem["answer"]):
        return f"the answer {problem['answer']!r} contains the control character {found}"
    if "\n" in problem["answer"]:
        return f"the answer {problem['answer']!r} is not a single one"
    return MISREAD.get(problem["id"])


def _row(problem: Mapping[str, Any], source: Path, where: str) -> dict[str, Any]:
    file = (source / problem["image"]).resolve()
    if not file.is_relative_to(source.resolve()) or not file.is_file():
        raise DataError(f"{where}, image: there is no {problem['image']} in {source}; restore the sample")
    data = file.read_bytes()
    with PIL.Image.open(io.BytesIO(data)) as image:
        extra = {"id": problem["id"], "mode": image.mode, "width": image.width, "height": image.height}
    return {
        "data_source": ORIGINS[problem["id"].split("_")[0]],
        "prompt": [{"role": "user", "content": _prompt(problem)}],
        "images": [{"bytes": data, "path": problem["image"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem["answer"]},
        "extra_info": extra,
    }


def _prompt(problem: Mapping[str, Any]) -> str:
    """Prompt of a problem. MATH-Vision marks the figure's place, and spells out line ends as `\\n` (not so in
    `\\nu`).
    """
    question = re.sub(r"\\n(?![a-z])", "\n", problem["question"]).strip()
    if IMAGE_TAG not in question:
        question = IMAGE_TAG + question
    return "\n".join([question, *_choices(problem), INSTRUCTION])


def _choices(problem: Mapping[str, Any]) -> list[str]:
    choices, letters = problem.get("choices") or [], "ABCDEFGH"
    if not choices:
        return []
    if problem["answer"] in tuple(letters):
        lettered = [f"({letter}) {choice}" for letter, choice in zip(letters, choices, strict=False)]
        return [*lettered, "Answer with the letter of the choice."]
    return ["The answer is one of: " + "; ".join(choices) + "."]
