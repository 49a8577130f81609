"""Text-only mathematics benchmarks: AIME, MATH-500."""

from __future__ import annotations

from npu_vlrl.tasks.benchmark.mathvista import INSTRUCTION
from npu_vlrl.tasks.benchmark.rows import Question, Row
from npu_vlrl.types import DataError


def aime(row: Row, number: int, seed: int) -> Question:
    """AIME of any year. Fields: problem (Problem, question), answer (Answer), and, where present, id (ID) and year."""
    answer = row.text("answer", "Answer").strip()
    if not (answer.isdecimal() and int(answer) <= 999):
        raise DataError(f"{row.where}, answer: {answer!r} is no whole number from 0 to 999; correct it")
    return Question(
        str(number) if row.get("id", "ID") is None else row.text("id", "ID"),
        f"{row.text('problem', 'Problem', 'question')}\n{INSTRUCTION}",
        str(int(answer)),
        category=None if row.get("year") is None else row.text("year"),
    )


def math500(row: Row, number: int, seed: int) -> Question:
    """MATH-500 (arXiv 2305.20050). Fields: problem, answer, subject, and unique_id where present."""
    name = str(number) if row.get("unique_id") is None else row.text("unique_id")
    text = f"{row.text('problem')}\n{INSTRUCTION}"
    return Question(name, text, row.text("answer"), category=row.text("subject"))
