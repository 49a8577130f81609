"""MathVista (arXiv 2310.02255), in the format of its data set and of its repository."""

from __future__ import annotations

from npu_vlrl.tasks.benchmark.rows import Question, Row
from npu_vlrl.types import DataError

INSTRUCTION = "Put the final answer in \\boxed{}."


def question(row: Row, number: int, seed: int) -> Question:
    """Converts a row. Fields: pid, query (or question), image or decoded_image, choices, answer, question_type,
    answer_type, precision, metadata.context, metadata.task. `query` holds the official hint and the lettered choices.
    """
    kind, answer_type = row.text("question_type"), row.text("answer_type")
    if kind not in ("multi_choice", "free_form"):
        raise DataError(f"{row.where}, question_type: {kind!r} is neither multi_choice nor free_form; correct it")
    choices = list(row.get("choices") or ())
    answer = row.text("answer")
    if kind == "multi_choice" and answer not in choices:
        raise DataError(f"{row.where}, answer: {answer!r} is none of the choices {choices}; correct it")
    metadata = row.get("metadata") or {}
    return Question(
        row.text("pid"),
        f"{row.text('query', 'question')}\n{INSTRUCTION}",
        answer,
        row.image("decoded_image", "image"),
        metadata.get("task"),
        metadata.get("context"),
        {
            "question_type": kind,
            "answer_type": answer_type,
            "precision": int(row.get("precision") or 0),
            "choices": choices,
        },
    )
