"""MathVerse (arXiv 2403.14624): each problem in several versions, which move text into the diagram."""

from __future__ import annotations

from npu_vlrl.tasks.benchmark.mathvista import INSTRUCTION
from npu_vlrl.tasks.benchmark.rows import Question, Row
from npu_vlrl.types import DataError


def question(row: Row, number: int, seed: int) -> Question:
    """Converts a row. Fields: sample_index, problem_version, question_type, query_cot (or question), image, answer."""
    kind, version = row.text("question_type"), row.text("problem_version")
    if kind not in ("multi-choice", "free-form"):
        raise DataError(f"{row.where}, question_type: {kind!r} is neither multi-choice nor free-form; correct it")
    text_only = version.casefold().replace("_", " ") == "text only"
    return Question(
        row.text("sample_index"),
        f"{row.text('query_cot', 'question')}\n{INSTRUCTION}",
        row.text("answer"),
        None if text_only else row.image("image"),
        version,
        None if text_only else "diagram",
        {"question_type": kind},
    )
