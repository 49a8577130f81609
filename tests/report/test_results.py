"""What an evaluation counts, by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from npu_vlrl.config import ConfigError
from npu_vlrl.report import evaluated, tables
from npu_vlrl.report.benchmark_scores import official_scores
from npu_vlrl.report.evaluated import means, summary, with_intervals
from npu_vlrl.report.results import Answer, TaskResult, divided, fingerprint, task_result
from npu_vlrl.report.run_folder import trajectory_record
from npu_vlrl.report.statistics import bootstrap_intervals
from npu_vlrl.types import EpisodeStatus, Task, Trajectory, Verdict
from npu_vlrl.workflow.export import outcome
from tests.support.scripted import Verdicts, a_task, an_image, play, workflow

LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
RIGHT, WRONG = Answer(True, True, 1.0, 1, False, 0.0), Answer(False, False, 0.0, 3, False, 0.0)
LATE, FAILED = Answer(False, True, 0.5, 2, False, 0.0), Answer(False, False, 0.0, 0, True)


def result(*answers: Answer, **changes: Any) -> TaskResult:
    kind: dict[str, Any] = {"benchmark": None, "category": None, "image_type": "photo", "image_pixels": 0}
    names = {"task": "t", "fingerprint": "f", "data_source": "made", "picture": None}
    return TaskResult(**{**kind, **names, **changes}, answers=answers)


def record(trajectory: Trajectory) -> dict[str, Any]:
    """As it comes back from the file."""
    return json.loads(json.dumps(trajectory_record(trajectory, {})))


def test_an_episode_is_counted_from_its_record() -> None:
    """A tool call is a turn and no try; the reward is the one that is trained."""
    settings: dict[str, Any] = {"tools": ("look",), "describe_tools": False, "tool_call_reward": -0.5}
    task = a_task(an_image(28), "?", hidden_image=an_image(56), image_type="photo", category="left", seed=3)
    verdicts = [Verdict(0.25, False), Verdict(1.0, True)]
    played = play(workflow(Verdicts(verdicts), max_turns=3, **settings), [LOOK, "down", "up"], task)
    for mode in ("best", "last", "sum"):
        found = task_result(task, [record(played)], mode, 0.5, patch_size=14)  # type: ignore[arg-type]
        (answer,) = found.answers
        assert answer == Answer(False, True, outcome(played, mode, 0.5), 3, False, 0.0)  # type: ignore[arg-type]
    assert (found.image_type, found.category, found.benchmark) == ("photo", "left", None)
    assert found.image_pixels == 28 * 28  # the image of the prompt, not that of the tool
    failed = Trajectory(task, "g", 1, (), EpisodeStatus.FAILED, "too long")
    both = task_result(task, [record(failed), record(played)], "best", 1.0, patch_size=14)
    assert both.answers[0] == FAILED and both.image_pixels == 28 * 28  # an answer that saw the image tells
    assert task_result(task, [record(failed)], "best", 1.0, patch_size=14).image_pixels == 0


def test_image_type_falls_back_to_the_data_source_where_there_is_an_image() -> None:
    seen, blind = a_task(an_image(28), "?"), a_task("?")
    played = [play(workflow(Verdicts([Verdict(1.0, True)])), ["up"], task) for task in (seen, blind)]
    found = [task_result(t.task, [record(t)], "best", 1.0, patch_size=14) for t in played]
    assert [(r.image_type, r.image_size) for r in found] == [
        (seen.data_source, "0² to 128² pixels"),
        ("no image", "no image"),
    ]


@pytest.mark.parametrize(
    ("pixels", "name"),
    [
        (0, "no image"),
        (1, "0² to 128² pixels"),
        (128**2 - 1, "0² to 128² pixels"),
        (128**2, "128² to 256² pixels"),
        (512**2, "512² to 1024² pixels"),
        (1024**2, "1024² pixels and more"),
    ],
)
def test_image_sizes(pixels: int, name: str) -> None:
    assert result(image_pixels=pixels).image_size == name


def test_measures_by_hand() -> None:
    four = result(RIGHT, WRONG, LATE, FAILED).measures()
    assert four == pytest.approx(
        {
            "accuracy": 1 / 4,
            "after_retries": 2 / 4,
            "reward": 1.5 / 4,
            "turns": 6 / 4,
            "failed": 1 / 4,
            "judge_failed": 0.0,
            "avg@4": 0.5,
            "pass@1": 0.5,
            "pass@2": 1 - 1 / 6,  # of six pairs one holds neither right answer
            "pass@4": 1.0,
        }
    )
    assert list(result(RIGHT).measures()) == ["accuracy", "after_retries", "reward", "turns", "failed", "judge_failed"]
    assert "judge_failed" not in result(FAILED).measures()  # nothing was judged
    assert list(result(RIGHT, WRONG, LATE).measures())[6:] == ["avg@3", "pass@1", "pass@2"]


def test_names_are_in_order_and_numbers_count_as_such() -> None:
    names = ["128² to 256² pixels", "1024² pixels and more", "no image", "0² to 128² pixels", "b10", "b9"]
    found = divided([result(image_type=name) for name in names], lambda one: one.image_type)
    assert list(found) == [names[3], names[0], names[1], "b9", "b10", "no image"]
    assert divided([result()], lambda one: one.category) == {}


def test_means_are_over_tasks_with_a_bootstrap_over_tasks() -> None:
    results = [result(RIGHT, LATE), result(WRONG, RIGHT), result(WRONG, WRONG)]
    assert means(results)["after_retries"] == pytest.approx((1 + 0.5 + 0) / 3) and means([]) == {"tasks": 0}
    found = with_intervals(results, seed=5)
    columns = list(results[0].measures())
    low_high = bootstrap_intervals(np.array([list(r.measures().values()) for r in results]), seed=5)
    for key, (low, high) in zip(columns, low_high, strict=True):
        assert found[key] == {"mean": pytest.approx(means(results)[key]), "low": low, "high": high}
    assert found["after_retries"]["low"] < 0.5 < found["after_retries"]["high"]
    assert with_intervals([], seed=0) == {"tasks": 0}


def test_a_summary_divides_by_every_kind() -> None:
    results = [
        result(RIGHT, data_source="a", category="x", image_pixels=10),
        result(WRONG, data_source="b", image_type="chart", image_pixels=10**6),
    ]
    found = summary(results, seed=0)
    assert list(found) == ["all", "data_source", "category", "image_type", "image_size"]
    assert {kind: list(names) for kind, names in found.items() if kind != "all"} == {
        "data_source": ["a", "b"],
        "category": ["x"],
        "image_type": ["chart", "photo"],
        "image_size": ["0² to 128² pixels", "512² to 1024² pixels"],
    }
    assert found["data_source"]["a"]["accuracy"]["mean"] == 1.0 and found["all"]["accuracy"]["mean"] == 0.5


def test_mme_counts_questions_and_images() -> None:
    """OCR: 3 of 4 questions and 1 of 2 images; a code image half right; colour in no sum of its own."""

    def question(category: str, name: str, *answers: Answer) -> TaskResult:
        return result(*answers, benchmark="mme", category=category, picture=name)

    results = [
        question("OCR", "1", RIGHT),
        question("OCR", "1", RIGHT),
        question("OCR", "2", RIGHT),
        question("code_reasoning", "3", WRONG),
        question("OCR", "2", LATE),  # not in the first answer
        question("code_reasoning", "3", RIGHT),
    ]
    scores = official_scores(results)["mme"]
    assert scores == {
        "OCR/acc": 75.0,
        "OCR/acc+": 50.0,
        "OCR": 125.0,
        "code_reasoning/acc": 50.0,
        "code_reasoning/acc+": 0.0,
        "code_reasoning": 50.0,
        "perception": 125.0,
        "cognition": 50.0,
    }
    twice = [question("OCR", "1", RIGHT, WRONG), question("OCR", "1", RIGHT, RIGHT)]
    assert official_scores(twice)["mme"]["OCR/acc+"] == 50.0  # the first answers are both right, the second are not


def test_other_benchmarks_report_accuracies() -> None:
    results = [
        result(a, benchmark="mmstar", category=c) for a, c in ((RIGHT, "math"), (WRONG, "math"), (WRONG, "logic"))
    ]
    results += [result(RIGHT, benchmark="aime"), result(RIGHT)]
    assert official_scores(results) == {
        "aime": {"accuracy": 100.0},
        "mmstar": {"accuracy": pytest.approx(100 / 3), "logic": 0.0, "math": 50.0, "average": 25.0},
    }


def test_a_fingerprint_knows_all_that_matters() -> None:
    task = a_task(an_image(28), "?", hidden_image=an_image(56), level=1)
    others = [
        dataclasses.replace(task, answer="other"),
        dataclasses.replace(task, extra={**task.extra, "level": 2}),
        dataclasses.replace(task, extra={**task.extra, "hidden_image": an_image(57)}),
        a_task(an_image(29), "?", hidden_image=an_image(56), level=1),
        a_task(an_image(28), "!", hidden_image=an_image(56), level=1),
    ]
    same = a_task(an_image(28), "?", level=1, hidden_image=an_image(56))
    assert fingerprint(same) == fingerprint(task)
    assert len({fingerprint(one) for one in (task, *others)}) == 6
    assert len(fingerprint(Task("t", (), None, "game", {"seed": 3}))) == 16


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = [result(RIGHT, LATE, task="a"), result(WRONG, FAILED, task="b", image_pixels=7, category="x")]
    settings = {"seed": 0, "answers": 2, "model": "m"}
    values = evaluated.write(tmp_path, settings, ["row 3: bad"], results)
    read, tasks = evaluated.read(tmp_path)
    assert read == json.loads(json.dumps(values)) and tasks == results
    before = (tmp_path / "evaluation.json").read_bytes()
    evaluated.write(tmp_path, settings, ["row 3: bad"], results)
    assert (tmp_path / "evaluation.json").read_bytes() == before
    with pytest.raises(ConfigError, match=r"holds no finished evaluation .*npu-vlrl eval --run-dir"):
        evaluated.read(tmp_path / "no")
    (tmp_path / "evaluation.json").write_text('{"tasks": [{"task": 1}]}')
    with pytest.raises(ConfigError, match=r"evaluation\.json cannot be read"):
        evaluated.read(tmp_path)


def test_the_table_says_percent_and_escapes_names(tmp_path: Path) -> None:
    results = [
        result(RIGHT, WRONG, data_source="a\x1b[31m"),
        result(WRONG, LATE, data_source="[bold]b", benchmark="aime"),
    ]
    values = evaluated.write(tmp_path, {"seed": 0, "answers": 2}, [], results)
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    console.print(*tables.evaluation(values))
    text = console.export_text()
    assert "data source a\\x1b[31m" in text and "data source [bold]b" in text and "\x1b" not in text
    assert "answers to each task: 2" in text and "pass@2" in text
    (line,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["all"]]
    assert line[:3] == ["all", "2", "25.0"] and line[-2:] == ["100.0", "2.25"]
    assert "aime: accuracy" in text and text.rstrip().endswith("0.00")
