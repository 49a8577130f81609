"""Official scores of benchmarks, from the first judged answer to each task, in percent (MME: points)."""

from __future__ import annotations

from collections.abc import Sequence

from npu_vlrl.report.results import TaskResult, divided

MME_PERCEPTION = (
    "existence",
    "count",
    "position",
    "color",
    "posters",
    "celebrity",
    "scene",
    "landmark",
    "artwork",
    "OCR",
)
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


def official_scores(results: Sequence[TaskResult]) -> dict[str, dict[str, float]]:
    """Scores by benchmark, then by name; with several answers to each task, their mean."""
    found = {}
    for benchmark in sorted({result.benchmark for result in results if result.benchmark is not None}):
        members = [result for result in results if result.benchmark == benchmark]
        found[benchmark] = _mme(members) if benchmark == "mme" else _accuracies(members)
    return found


def _accuracies(results: Sequence[TaskResult]) -> dict[str, float]:
    """`accuracy` over all tasks, of each category, and `average` of the categories (which MMStar reports)."""
    scores = {"accuracy": 100 * _mean([_accuracy(result) for result in results])}
    by_category = divided(results, _category)
    for category, members in by_category.items():
        scores[category] = 100 * _mean([_accuracy(result) for result in members])
    if len(by_category) > 1:
        scores["average"] = _mean([scores[category] for category in by_category])
    return scores


def _mme(results: Sequence[TaskResult]) -> dict[str, float]:
    """Points of each category: acc, the share of questions, and acc+, the share of images all of whose questions were
    answered right, in percent each; `perception` and `cognition` are sums of their categories.
    """
    scores: dict[str, float] = {}
    sums = {"perception": 0.0, "cognition": 0.0}
    for category, members in divided(results, _category).items():
        acc, acc_plus = 100 * _mean([_accuracy(result) for result in members]), 100 * _both_right(members)
        scores |= {f"{category}/acc": acc, f"{category}/acc+": acc_plus, category: acc + acc_plus}
        if category in MME_PERCEPTION or category in MME_COGNITION:
            sums["perception" if category in MME_PERCEPTION else "cognition"] += acc + acc_plus
    return scores | sums


def _both_right(results: Sequence[TaskResult]) -> float:
    by_image: dict[str | None, list[TaskResult]] = {}
    for result in results:
        by_image.setdefault(result.picture, []).append(result)
    answers = range(len(results[0].answers))
    return _mean([all(m.answers[i].first for m in members) for members in by_image.values() for i in answers])


def _category(result: TaskResult) -> str | None:
    return result.category


def _accuracy(result: TaskResult) -> float:
    return _mean([answer.first for answer in result.answers])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
