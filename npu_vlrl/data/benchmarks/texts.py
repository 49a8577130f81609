"""Mathematics without pictures: AIME, MATH-500."""

from __future__ import annotations

from npu_vlrl.data.benchmarks.mathvista import INSTRUCTION
from npu_vlrl.data.benchmarks.rows import Question, Row
from npu_vlrl.types import DataError


def aime(row: Row, number: int, seed: int) -> Question:
    """AIME of any year. Fields: problem (Problem, question), answer (Answer), and id (ID) and year where they are."""
    answer = row.text("answer", "Answer").strip()
    if not (answer.isdecimal() and int(answer) <= 999):
        raise DataError(f"{row.where}, answer: {answer!r} is no whole number from 0 to 999; correct it")
    year = row.get("year")
    return Question(
        str(row.get("id", "ID") if row.get("id", "ID") is not None else number),
        f"{row.text('problem', 'Problem', 'question')}\n{INSTRUCTION}",
        str(int(answer)),
        category=None if year is None else str(year),
    )


def math500(row: Row, number: int, seed: int) -> Question:
    """MATH-500 (arXiv 2305.20050). Fields: problem, answer, subject, and unique_id where it is."""
    unique = row.get("unique_id")
    text = f"{row.text('problem')}\n{INSTRUCTION}"
    return Question(str(number if unique is None else unique), text, row.text("answer"), category=row.text("subject"))
