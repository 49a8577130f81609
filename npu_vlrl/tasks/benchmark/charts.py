"""ChartQA (arXiv 2203.10244): questions about charts, by people or made from captions."""

from __future__ import annotations

from npu_vlrl.data.values import is_number
from npu_vlrl.tasks.benchmark.rows import Question, Row
from npu_vlrl.types import DataError

INSTRUCTION = "Answer with a single word or number in \\boxed{}."


def question(row: Row, number: int, seed: int) -> Question:
    """Fields: image (or imgname), question (or query), answer (or label, a text or a list of one); and, of the
    question's author: type (human_test …), human_or_machine (0 …), or the file's name (test_human.json …).
    """
    label = row.get("answer", "label")
    if isinstance(label, list) and len(label) == 1:
        (label,) = label
    if not isinstance(label, str) and not is_number(label):
        raise DataError(f"{row.where}, answer: expected a text or a list of one, got {label!r:.60}; correct it")
    return Question(
        str(number),
        f"{row.text('question', 'query')}\n{INSTRUCTION}",
        row.as_text(label, "answer", "label"),
        row.image("image", "imgname"),
        _asked_by(row),
        "chart",
    )


def _asked_by(row: Row) -> str:
    said = row.get("type", "human_or_machine")
    words = {0: "human", 1: "augmented"}.get(said, said) if said is not None else row.where
    for name in ("human", "augmented"):
        if name in str(words):
            return name
    raise DataError(f"{row.where}: who asked, human or augmented? Give it in type, human_or_machine or the file's name")
