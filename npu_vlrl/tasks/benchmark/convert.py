"""Converts the rows of a benchmark to parquet in verl's schema."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from npu_vlrl.data.columns import IMAGE_TAG
from npu_vlrl.data.records import written_schema
from npu_vlrl.tasks.benchmark import charts, choices, mathverse, mathvista, texts
from npu_vlrl.tasks.benchmark.rows import Question, Row, read_rows
from npu_vlrl.types import DataError

Adapter = Callable[[Row, int, int], Question]
"""Function of a row, its number and the seed that returns a question. Raises DataError."""

BENCHMARKS: dict[str, Adapter] = {
    "mathvista": mathvista.question,
    "mathverse": mathverse.question,
    "chartqa": charts.question,
    "mme": choices.mme,
    "mmstar": choices.mmstar,
    "gpqa": choices.gpqa,
    "aime": texts.aime,
    "math500": texts.math500,
}

SCHEMA = written_schema(
    {
        "id": pa.string(),
        "benchmark": pa.string(),
        "category": pa.string(),
        "image_type": pa.string(),
        "picture": pa.string(),
        "question_type": pa.string(),
        "answer_type": pa.string(),
        "precision": pa.int32(),
        "choices": pa.list_(pa.string()),
        "order": pa.list_(pa.int32()),
    }
)

_ROW_GROUP = 64


def convert(name: str, source: Path, out: Path, images: Path | None, seed: int) -> tuple[Path, int]:
    """Writes `out/NAME.parquet`, in the order of the source; returns it and the number of its rows.

    `seed` shuffles the options of GPQA. Raises DataError, naming the row, for one that is not as published; then no
    file is written.
    """
    adapter = BENCHMARKS[name]
    rows = (_written(name, adapter(row, number, seed)) for number, row in enumerate(read_rows(source, images)))
    out.mkdir(parents=True, exist_ok=True)
    target, part, count = out / f"{name}.parquet", out / f"{name}.parquet.part", 0
    try:
        with pq.ParquetWriter(part, SCHEMA) as writer:
            while group := list(islice(rows, _ROW_GROUP)):
                writer.write_table(pa.Table.from_pylist(group, SCHEMA))
                count += len(group)
        if not count:
            raise DataError(f"{source}: there are no rows in it; get the file again")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return target, count


def _written(name: str, question: Question) -> dict[str, Any]:
    shown = question.image is not None
    text = question.text.replace(IMAGE_TAG, "").strip()
    return {
        "data_source": name,
        "prompt": [{"role": "user", "content": f"{IMAGE_TAG if shown else ''}{text}"}],
        "images": [{"bytes": question.image, "path": None}] if shown else [],
        "ability": "math" if name in ("mathvista", "mathverse", "aime", "math500") else "vqa",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {
            "id": question.id,
            "benchmark": name,
            "category": question.category,
            "image_type": question.image_type,
            **question.extra,
        },
    }
