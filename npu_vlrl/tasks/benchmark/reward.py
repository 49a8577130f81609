"""Rule `benchmark`: scores published benchmarks by their own rules, chosen by our adapters' `extra_info.benchmark`.

Where a benchmark lets a language model find the answer in the text, the text's last `\\boxed{}` is taken, for which our
prompts ask; without one, the answer that the benchmark's documented rules find.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from npu_vlrl.types import DataError, Verdict
from npu_vlrl.workflow.rewards.answers import Number, quantity, same_plain
from npu_vlrl.workflow.rewards.answers.choices import option, stated
from npu_vlrl.workflow.rewards.answers.units import PERCENT
from npu_vlrl.workflow.rewards.extract import boxed, first_letter, last_box, letter, number, yes_or_no
from npu_vlrl.workflow.rewards.math_verify import equals_published
from npu_vlrl.workflow.thought import split_thought

Extra = Mapping[str, Any]


def score(answer: str, text: str, extra: Extra) -> Verdict:
    """Scores 1 when `text`, outside of its thoughts, is right by the rule of the benchmark, else 0; solved when right.

    `extra` is `extra_info` of the task. Raises DataError when it names no benchmark, or when `answer` is no valid gold.
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
    """Whether the answer is right by relaxed accuracy (arXiv 2203.10244, section 5.1): numbers within 5 % of the gold,
    anything else by its letters.

    As in the published code, a percentage is a share, and a gold of 0 has no tolerance.
    """
    found = boxed(text)
    said, gold = _share(found), _share(answer)
    if said is None or gold is None or (said.unit and gold.unit and not said.unit.factors(gold.unit)):
        return same_plain(answer, found)
    factor = said.unit.factors(gold.unit)[0] if said.unit and gold.unit else 1
    return abs(said.value * factor - gold.value) * 20 <= abs(gold.value)


def _share(text: str) -> Number | None:
    """Number of a text; `12%` is 0.12."""
    found = quantity(text)
    return Number(found.value / 100) if found is not None and found.unit == PERCENT else found


def mathvista(answer: str, text: str, extra: Extra) -> bool:
    """Whether the answer found, brought to the form of the gold, is equal to it.

    Whole numbers lose their decimals, decimal ones are rounded to the gold's `precision`. Among choices the answer is
    the one whose letter was given; else the one with the same reading, then the most similar one, by edit distance.
    """
    quoted = re.search(r'The answer is "([^"\n]*)"', text)
    found = last_box(text)
    if found is None and quoted:
        found = quoted[1]
    if extra.get("question_type") == "multi_choice":
        return _choice(text, found, extra["choices"]) == answer.strip()
    boxed_text = text if found is None else f"\\boxed{{{found}}}"
    if extra.get("answer_type") in ("integer", "float"):
        value, gold = number(boxed_text), quantity(answer)
        if value is None or gold is None:
            return False
        return gold.value == (int(value) if extra["answer_type"] == "integer" else _rounded(value, extra["precision"]))
    return same_plain(answer, boxed(boxed_text))


def _rounded(value: Fraction, precision: int) -> Fraction | None:
    """Rounds and prints a number as a float, as the published evaluation does; None where it overflows."""
    try:
        return Fraction(str(round(float(value), precision)))
    except OverflowError:
        return None


def _choice(text: str, found: str | None, choices: list[str]) -> str | None:
    if found is None:
        return _lettered(stated(text), choices)
    content = boxed(f"\\boxed{{{found}}}")
    named = option(content)
    equal = [choice for choice in choices if same_plain(choice, content)]
    likely = _lettered(named and named[0].upper(), choices) or (equal[0] if len(equal) == 1 else None)
    likely = likely or _lettered(stated(text), choices)
    return likely or min(choices, key=lambda choice: _distance(content[:200], choice[:200]))


def _lettered(said: str | None, choices: list[str]) -> str | None:
    index = ord(said) - ord("A") if said else len(choices)
    return choices[index] if index < len(choices) else None


def _distance(one: str, other: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, start=1):
        before, row[0] = row[0], i
        for j, yours in enumerate(other, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (mine != yours))
    return row[-1]


def mathverse(answer: str, text: str, extra: Extra) -> bool:
    """Whether the answer is the letter of the right choice, or the same mathematics (officially a language model
    compares).
    """
    if extra.get("question_type") == "multi-choice":
        return letter(text) == answer.strip().strip("()").upper()
    return mathematics(answer, text, extra)


def mathematics(answer: str, text: str, extra: Extra) -> bool:
    """Whether the last box is the gold, as the rule `math_verify` reads them."""
    box = last_box(text)
    return box is not None and equals_published(answer, box)


def mme(answer: str, text: str, extra: Extra) -> bool:
    """Whether yes or no is right, found as in the published evaluation."""
    return yes_or_no(text) == answer.strip().rstrip(".").casefold()


def mmstar(answer: str, text: str, extra: Extra) -> bool:
    """Whether the letter in the box is right; without a box, as published, the letter at the beginning."""
    return (first_letter(text) if last_box(text) is None else letter(text)) == answer


def gpqa(answer: str, text: str, extra: Extra) -> bool:
    """Whether the letter in the box, or after `answer is`, is right."""
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
