"""Published benchmarks, scored by their own rules: `extra_info.benchmark`, which our adapters write, says which.

Where a benchmark has a language model find the answer in the text, the text's last `\\boxed{}` is taken, for which our
prompts ask, and without one what the benchmark's documented rules find.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.rewards import math_verify
from npu_vlrl.workflow.rewards.extract import boxed, first_letter, letter, number, yes_or_no
from npu_vlrl.workflow.rewards.math_verify import last_box
from npu_vlrl.workflow.thought import split_thought

Extra = Mapping[str, Any]


def score(answer: str, text: str, extra: Extra) -> Verdict:
    """1 when `text`, outside of its thoughts, answers rightly by the rule of the benchmark, else 0; solved when right.

    `extra` is `extra_info` of the task. Raises DataError when it names no benchmark, or when `answer` cannot be judged
    against.
    """
    rule = _RULES.get(extra.get("benchmark", ""))
    if rule is None:
        raise DataError(
            f"extra_info.benchmark is {extra.get('benchmark')!r}; make the data with `npu-vlrl data benchmark`, or use "
            "another reward.rule"
        )
    right = rule(answer, split_thought(text).answer, extra)
    return Verdict(float(right), right, terms={"accuracy": float(right)})


def check_gold(answer: str) -> None:
    """Raises DataError for an empty answer; the adapters check the rest."""
    if not answer.strip():
        raise DataError("the gold answer is empty; make the data again with `npu-vlrl data benchmark`")


def chartqa(answer: str, text: str, extra: Extra) -> bool:
    """Relaxed accuracy (arXiv 2203.10244, section 5.1): numbers within 5 % of the gold, anything else by its letters.

    As in the published code, a gold of 0 has no tolerance and is compared by its letters.
    """
    found = boxed(text)
    said, gold = _float(found), _float(answer)
    if said is not None and gold:
        return abs(said - gold) / abs(gold) <= 0.05
    return found.casefold() == answer.casefold()


def _float(text: str) -> float | None:
    """`12%` is 0.12."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def mathvista(answer: str, text: str, extra: Extra) -> bool:
    """The answer found, brought to the form of the gold, is equal to it letter by letter (see `_normalised`)."""
    return _normalised(text, extra) == answer.strip()


def _normalised(text: str, extra: Extra) -> str | None:
    """Whole numbers without decimals, decimal ones rounded to the gold's `precision`. Of choices the one whose letter
    was given; else the most similar to what is in the box or after `The answer is`, by edit distance.
    """
    quoted = re.search(r'The answer is "([^"\n]*)"', text)
    found = last_box(text)
    if found is None and quoted:
        found = quoted[1]
    if extra.get("question_type") == "multi_choice":
        return _choice(text, found, extra["choices"])
    if extra.get("answer_type") in ("integer", "float"):
        value = number(text if found is None else found)
        if value is None:
            return None
        return str(int(value)) if extra["answer_type"] == "integer" else str(round(value, extra["precision"]))
    return boxed(text if found is None else f"\\boxed{{{found}}}")


def _choice(text: str, found: str | None, choices: list[str]) -> str | None:
    if found is None:
        said = letter(text)
        return None if said is None else _lettered(said, choices)
    box = f"\\boxed{{{found}}}"
    content = boxed(box)
    named = _lettered(letter(box) or "", choices)
    return named or min(choices, key=lambda choice: _distance(content[:200], choice[:200]))


def _lettered(said: str, choices: list[str]) -> str | None:
    index = ord(said) - ord("A") if said else len(choices)
    return choices[index] if index < len(choices) else None


def _distance(one: str, other: str) -> int:
    """Levenshtein's."""
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, start=1):
        before, row[0] = row[0], i
        for j, yours in enumerate(other, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (mine != yours))
    return row[-1]


def mathverse(answer: str, text: str, extra: Extra) -> bool:
    """The letter of the choice, or the same mathematics (a language model compares them officially)."""
    if extra.get("question_type") == "multi-choice":
        return letter(text) == answer.strip().strip("()").upper()
    return mathematics(answer, text, extra)


def mathematics(answer: str, text: str, extra: Extra) -> bool:
    """The last box is the gold, by math-verify or by its letters without spaces and fonts."""
    box = last_box(text)
    if box is None:
        return False
    if _plain(box) == _plain(answer):
        return True
    try:
        return math_verify.equals(answer, box)
    except DataError:  # a word, which no parser takes
        return False


def _plain(latex: str) -> str:
    words = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", latex)
    return re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[,!; ]|[\s$]", "", words).rstrip(".")


def mme(answer: str, text: str, extra: Extra) -> bool:
    """Yes or no, found as the published evaluation does."""
    return yes_or_no(text) == answer.strip().rstrip(".").casefold()


def mmstar(answer: str, text: str, extra: Extra) -> bool:
    """The letter in the box; without one, as published, the one at the beginning."""
    return (first_letter(text) if last_box(text) is None else letter(text)) == answer


def gpqa(answer: str, text: str, extra: Extra) -> bool:
    """The letter in the box, or after `answer is`."""
    return letter(text) == answer


_RULES: dict[str, Callable[[str, str, Extra], bool]] = {
    "mathvista": mathvista,
    "mathverse": mathverse,
    "chartqa": chartqa,
    "mme": mme,
    "mmstar": mmstar,
    "gpqa": gpqa,
    "aime": mathematics,
    "math500": mathematics,
}
