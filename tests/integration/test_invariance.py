"""The engine's own trajectories in the learner: same log-probabilities, and one gradient however they are cut up."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_vlrl.learner.trainer import Learner, LearnerError
from npu_vlrl.rollout.collect import Rollout
from npu_vlrl.training.run import Run
from npu_vlrl.types import Sample
from npu_vlrl.workflow.export import ExportStyle, export
from tests.support.learning import Probe, distance, make_learner, with_advantage
from tests.support.runs import small_config

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("invariance") / "run"
    with ExitStack() as cleanup:
        yield Run(small_config(folder, workflow__max_turns=3, rollout__groups=3), cleanup)


@pytest.fixture(scope="module")
def rollout(run: Run) -> Rollout:
    played = asyncio.run(run.rollout(0))
    assert any(len(trajectory.turns) == 3 for trajectory in played.trajectories)
    return played


def samples(rollout: Rollout, style: ExportStyle, advantages: tuple[float, ...] = (1.0, -0.5, 0.25)) -> list[Sample]:
    """All turns of a trajectory have the same advantage."""
    found = []
    for number, trajectory in enumerate(rollout.trajectories):
        value = advantages[number % len(advantages)]
        found += [with_advantage(s, value) for s in export([trajectory], style, "sum", 1.0, "tiny")]
    return found


def probe(run: Run, **algorithm: Any) -> Probe:
    budget = algorithm.pop("budget", 10_000)
    settings = {"aggregation": "token-mean", "max_logprob_gap": 1e-4, **algorithm}
    return make_learner(run.parts.loaded, settings, Probe, micro_batch_tokens=budget)


def learner_that_steps(run: Run) -> Learner:
    return make_learner(run.parts.loaded, {"max_logprob_gap": 0.05}, lr=1e-2)


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_every_token_is_as_likely_as_the_engine_said(run: Run, rollout: Rollout, style: ExportStyle) -> None:
    for budget in (10_000, 150, 1):
        metrics = probe(run, budget=budget).step(samples(rollout, style))
        assert metrics["logprob_gap"] < 1e-5
        assert metrics["tokens"] == sum(len(turn.action) for t in rollout.trajectories for turn in t.turns)


@pytest.mark.parametrize("style", ["concat", "individual"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_micro_batches_change_nothing(run: Run, rollout: Rollout, style: ExportStyle, aggregation: str) -> None:
    batch = samples(rollout, style)
    whole, parts, alone = (probe(run, aggregation=aggregation, budget=b).measure(batch) for b in (10_000, 150, 1))
    assert distance(parts, whole) < 2e-6 and distance(alone, whole) < 2e-6


def test_concat_and_individual_are_the_same_gradient(run: Run, rollout: Rollout) -> None:
    """With equal weights for equal tokens: `token-mean` weighs by the number of tokens, which is the same."""
    found = {style: probe(run) for style in ("concat", "individual")}
    gradients = {style: found[style].measure(samples(rollout, style)) for style in ("concat", "individual")}
    assert distance(gradients["individual"], gradients["concat"]) < 2e-6
    assert found["individual"].loss == pytest.approx(found["concat"].loss, rel=1e-4)
    assert len(samples(rollout, "individual")) > len(samples(rollout, "concat"))
    other = samples(rollout, "individual")  # and one turn of another weight is seen
    other[0] = with_advantage(other[0], 0.9)
    assert distance(probe(run).measure(other), gradients["concat"]) > 1e-3


def test_weights_that_change_behind_the_engine_s_back_stop_the_run(run: Run, rollout: Rollout) -> None:
    parameter = run.parts.loaded.policy.text.layers[0].mlp.down_proj.weight
    learner = learner_that_steps(run)
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter += 0.3
    before = {name: p.detach().clone() for name, p in learner.parameters.items()}
    with pytest.raises(LearnerError, match="engine and learner do not hold the same weights, images or tokens"):
        learner.step(samples(rollout, "concat"))
    assert all(torch.equal(p, before[name]) for name, p in learner.parameters.items())
    with torch.no_grad():
        parameter.copy_(kept)
    learner.step(samples(rollout, "concat"))  # they hold the same again


def test_another_picture_stops_the_run(run: Run, rollout: Rollout) -> None:
    batch = samples(rollout, "concat")
    prompt = batch[0].segments[0]
    picture = prompt.images[0]
    dark = replace(picture, image=type(picture.image)(picture.image.rgb // 4))
    swapped = replace(prompt, special=run.parts.loaded.policy.special, images=(dark,))
    batch[0] = replace(batch[0], segments=(swapped, *batch[0].segments[1:]))
    with pytest.raises(LearnerError):
        make_learner(run.parts.loaded, {"max_logprob_gap": 1e-3}).step(batch)


def test_trajectories_are_stale_after_a_step_and_fresh_ones_are_not(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        run = Run(small_config(tmp_path / "run", algorithm__max_logprob_gap=0.01), cleanup)
        learner = run.new_learner()
        played = asyncio.run(run.rollout(0))
        assert learner.step(samples(played, "concat"))["logprob_gap"] < 1e-5
        with pytest.raises(LearnerError):
            for _ in range(3):
                learner.step(samples(played, "concat"))
        run.parts.engine.weights_changed(1)
        fresh = asyncio.run(run.rollout(1))
        assert {v for s in samples(fresh, "concat") for v in s.weight_versions} == {1}
        assert learner.step(samples(fresh, "concat"))["logprob_gap"] < 1e-5
