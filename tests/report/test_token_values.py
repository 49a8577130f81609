"""Numbers of tokens, brought from samples to the turns of their trajectories."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from npu_vlrl.report.run_folder import trajectory_record
from npu_vlrl.report.token_values import token_values
from npu_vlrl.types import Credit, Sample
from npu_vlrl.workflow.export import export
from tests.support.learning import load, trajectory

EPISODE = trajectory(load(), 5, (3, 2), group="g")


def counted(sample: Sample) -> Sample:
    """With the advantages 0, 1, 2, …"""
    n = sample.n_scored
    return replace(sample, credit=Credit(np.arange(n, dtype=np.float64), np.zeros(n), np.zeros(n, dtype=bool)))


def notes(samples: list[Sample]) -> dict[str, np.ndarray]:
    rows = {s.id: np.arange(s.n_scored, dtype=np.float32) for s in samples}
    return {name: np.stack([-row / 3, row * 10]) for name, row in rows.items()}


def test_one_sample_for_all_turns() -> None:
    samples = [counted(s) for s in export([EPISODE], "concat", "sum", 1.0, "tiny")]
    found = token_values(samples, notes(samples))
    assert found == {
        ("g/5", 0): {
            "advantages": [0.0, 1.0, 2.0],
            "learner_logprobs": [0.0, -0.333333, -0.666667],
            "entropy": [0.0, 10.0, 20.0],
        },
        ("g/5", 1): {"advantages": [3.0, 4.0], "learner_logprobs": [-1.0, -1.333333], "entropy": [30.0, 40.0]},
    }
    first, second = trajectory_record(EPISODE, {}, values=found)["turns"]
    assert first["action"]["entropy"] == [0.0, 10.0, 20.0] and second["action"]["advantages"] == [3.0, 4.0]
    assert list(second["action"])[:2] == ["kind", "token_ids"]


def test_a_sample_for_each_turn() -> None:
    samples = [counted(s) for s in export([EPISODE], "individual", "sum", 1.0, "tiny")]
    found = token_values(samples, {})
    assert found == {("g/5", 0): {"advantages": [0.0, 1.0, 2.0]}, ("g/5", 1): {"advantages": [0.0, 1.0]}}


def test_what_stands_between_turns_is_passed_over() -> None:
    (sample,) = export([EPISODE], "concat", "sum", 1.0, "tiny")
    between = len(sample.segments[2])
    wide = counted(replace(sample, with_observations=True))
    found = token_values([wide], {})
    assert found["g/5", 0]["advantages"] == [0.0, 1.0, 2.0]
    assert found["g/5", 1]["advantages"] == [3.0 + between, 4.0 + between]


def test_nothing_is_made_up() -> None:
    samples = export([EPISODE], "concat", "sum", 1.0, "tiny")
    assert token_values(samples, {}) == {("g/5", 0): {}, ("g/5", 1): {}}
    assert "advantages" not in trajectory_record(EPISODE, {}, values={})["turns"][0]["action"]
    assert token_values([], {}) == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_becomes_null(bad: float) -> None:
    (sample,) = export([EPISODE], "concat", "sum", 1.0, "tiny")
    n = sample.n_scored
    sick = replace(sample, credit=Credit(np.full(n, bad), np.zeros(n), np.zeros(n, dtype=bool)))
    assert token_values([sick], {})["g/5", 1]["advantages"] == [None, None]
