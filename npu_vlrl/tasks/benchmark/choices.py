"""Benchmarks that are answered by yes or no, or by a letter: MME, MMStar, GPQA."""

from __future__ import annotations

import random

from npu_vlrl.tasks.benchmark.rows import Question, Row
from npu_vlrl.types import DataError

LETTERS = "ABCD"

LETTER_INSTRUCTION = "Put the letter of the right option in \\boxed{}."


def mme(row: Row, number: int, seed: int) -> Question:
    """MME (arXiv 2306.13394). Fields: question_id (of the image), image, question, answer (Yes or No), category.

    The question itself asks for yes or no. Each image has two questions, which acc+ counts together.
    """
    category, name, answer = row.text("category"), row.text("question_id"), row.text("answer")
    if answer.strip().rstrip(".").casefold() not in ("yes", "no"):
        raise DataError(f"{row.where}, answer: {answer!r} is neither Yes nor No; correct it")
    return Question(
        f"{category}/{name}/{number}",
        row.text("question"),
        answer,
        row.image("image"),
        category,
        category,
        {"picture": f"{category}/{name}"},
    )


def mmstar(row: Row, number: int, seed: int) -> Question:
    """MMStar (arXiv 2403.20330). Fields: index, question (which holds the options), image, answer, category."""
    return Question(
        row.text("index"),
        f"{row.text('question')}\n{LETTER_INSTRUCTION}",
        _letter(row),
        row.image("image"),
        row.text("category"),
    )


def gpqa(row: Row, number: int, seed: int) -> Question:
    """GPQA (arXiv 2311.12022). Fields: Question, Correct Answer, Incorrect Answer 1 to 3, Record ID, High-level domain.

    `order` of the result is the number of the answer at each letter; 0 is the right one.
    """
    fields = ["Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))]
    answers = [row.text(field).strip() for field in fields]
    name = row.text("Record ID")
    order = list(range(len(answers)))
    random.Random(f"{seed}/{name}").shuffle(order)
    options = [f"({letter}) {answers[which]}" for letter, which in zip(LETTERS, order, strict=True)]
    head = f"What is the correct answer to this question: {row.text('Question').strip()}"
    text = "\n".join([head, "", "Choices:", *options, "", LETTER_INSTRUCTION])
    return Question(name, text, LETTERS[order.index(0)], category=row.get("High-level domain"), extra={"order": order})


def _letter(row: Row) -> str:
    answer = row.text("answer").strip().upper()
    if len(answer) != 1 or answer not in LETTERS:
        raise DataError(f"{row.where}, answer: {answer!r} is no letter from A to D; correct it")
    return answer
