"""Rounds that are interrupted: turns go on from their tokens, and each token's logprob is that of its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_vlrl.engines.base import Outcome, Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.engines.inprocess.kv_cache import KeyValues
from npu_vlrl.types import Generation, SamplingParams, StopReason, Trajectory
from npu_vlrl.workflow.export import export
from tests.support.episodes import RecordingEngine, Stage, long_episode
from tests.support.models import load, tiny_folder
from tests.support.rounds import params, prompt, run
from tests.support.scoring import TOLERANCE, learner_logprobs

torch.set_num_threads(1)

TURN_TOKENS = 12


class Interrupted(InProcessEngine):
    """Each round is interrupted after a few steps, and then maybe the weights change."""

    def begin(self, steps: int, changes: bool) -> None:
        self.steps, self.changes = steps, changes
        self.asked = self.cut = 0
        self.weights: list[dict[str, Tensor]] = [self.copy()]
        self.interrupted = self.ask_for_more

    def ask_for_more(self) -> bool:
        self.asked += 1
        return self.asked > self.steps

    def copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.policy.trainable().items()}

    @torch.no_grad()
    def put(self, version: int) -> None:
        for name, tensor in self.policy.trainable().items():
            tensor.copy_(self.weights[version][name])

    async def play(self, requests: Sequence[Request]) -> list[Outcome]:
        self.asked = 0
        outcomes = self.sample(requests)
        self.cut += sum(isinstance(o, Generation) and o.stop_reason is StopReason.INTERRUPTED for o in outcomes)
        if self.changes:
            with torch.no_grad():
                for parameter in self.policy.trainable().values():
                    parameter.mul_(1.04)
            self.weights.append(self.copy())
            self.weights_changed(self.weight_version + 1)
        return outcomes


def staged(kind: str, steps: int, changes: bool, cache_bytes: int = 2**34) -> tuple[Stage, Interrupted]:
    stage = Stage(load(tiny_folder(kind)))
    engine = Interrupted(stage.policy, stage.vision, cache_bytes)
    engine.begin(steps, changes)
    stage.engine, stage.recorder = engine, RecordingEngine(engine)
    return stage, engine


def gap(stage: Stage, engine: Interrupted, played: Sequence[Trajectory], shift: int) -> float:
    """Largest difference to what the learner computes with the weights of each token's version (plus `shift`)."""
    samples = export(played, "concat", "best", 1.0, "")
    worst = 0.0
    for version in {v for sample in samples for v in sample.weight_versions}:
        engine.put(version + shift)
        stage.vision.weights_changed()
        ours = learner_logprobs(stage.policy, stage.vision, samples)
        for sample in samples:
            at = torch.tensor(sample.weight_versions) == version
            theirs = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
            if at.any():
                worst = max(worst, float((ours[sample.id] - theirs).abs()[at].max()))
    return worst


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3"])
def test_each_token_has_the_logprob_of_the_weights_that_made_it(kind: str) -> None:
    stage, engine = staged(kind, steps=3, changes=True)
    played = stage.play(long_episode(kind), turn_tokens=TURN_TOKENS)
    turns = [turn.action for trajectory in played for turn in trajectory.turns]
    assert all(trajectory.error is None for trajectory in played)
    assert max(len(set(turn.weight_versions)) for turn in turns) >= 3
    for turn in turns:
        assert list(turn.weight_versions) == sorted(turn.weight_versions) and len(turn) <= TURN_TOKENS
        ended = turn.token_ids[-1] in stage.policy.special.end_of_turn
        assert turn.stop_reason is (StopReason.END_OF_TURN if ended else StopReason.TURN_BUDGET)
        assert ended or len(turn) == TURN_TOKENS
    assert gap(stage, engine, played, shift=0) < TOLERANCE
    assert gap(stage, engine, played, shift=1) > 100 * TOLERANCE, "the check tells versions apart"


def test_replayed_experts_are_those_of_the_newest_weights() -> None:
    """New weights send the context to other experts, and what they sample has seen those."""
    stage, engine = staged("qwen3_vl_moe", steps=3, changes=True)
    samples = export(stage.play(long_episode("qwen3_vl_moe"), turn_tokens=TURN_TOKENS), "concat", "best", 1.0, "")
    newest = {max(sample.weight_versions) for sample in samples}
    assert any(len(set(sample.weight_versions)) >= 3 for sample in samples)
    gaps = []
    for version in newest:
        engine.put(version)
        stage.vision.weights_changed()
        chosen = [sample for sample in samples if max(sample.weight_versions) == version]
        ours = learner_logprobs(stage.policy, stage.vision, chosen)
        for sample in chosen:
            gap_N = (ours[sample.id] - torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)).abs()
            gaps.append(gap_N[torch.tensor(sample.weight_versions) == version].max())
    assert max(gaps) < TOLERANCE


def test_an_interruption_alone_changes_nothing() -> None:
    """Greedy turns are those that nobody interrupted, and nothing that was computed is computed again."""
    stage, engine = staged("qwen2_5_vl", steps=2, changes=False)
    tasks = long_episode("qwen2_5_vl")
    cut = stage.play(tasks, 1, TURN_TOKENS, temperature=0.0)
    whole = Stage(stage.loaded)
    expected = whole.play(tasks, 1, TURN_TOKENS, temperature=0.0)
    assert engine.cut > 5
    for one, other in zip(cut, expected, strict=True):
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.action.token_ids == b.action.token_ids and a.action.stop_reason is b.action.stop_reason
            assert a.action.logprobs == pytest.approx(b.action.logprobs, abs=TOLERANCE)
    counts, usual = engine.counts, whole.engine.counts
    assert (counts.turns, counts.tokens_decoded) == (usual.turns, usual.tokens_decoded)
    assert counts.tokens_prefilled == usual.tokens_prefilled + engine.cut  # the last token of each part


def test_what_waits_for_room_is_interrupted_without_a_token() -> None:
    """The first wave draws at least one token, so that every round gets somewhere."""
    stage, engine = staged("qwen3", steps=0, changes=False)
    context = prompt(stage, "up?")
    engine.cache_bytes = (len(context[0]) + 6) * KeyValues.bytes_per_token(stage.policy)  # room for one turn
    answers: list[list[Outcome]] = []
    sample = engine.sample

    def watched(requests: Sequence[Request]) -> list[Outcome]:
        answers.append(sample(requests))
        return answers[-1]

    engine.sample = watched  # type: ignore[method-assign]

    async def one_turn(seed: int) -> Generation:
        session = engine.session()
        try:
            return await session.generate(context, params(seed))
        finally:
            session.close()

    done = run(*(one_turn(seed) for seed in range(3)))
    assert all(one.stop_reason is not StopReason.INTERRUPTED and one.token_ids for one in done)
    lengths = [[len(a.token_ids) if isinstance(a, Generation) else None for a in round_] for round_ in answers]
    assert lengths[0] == [1, 0, 0]


def test_the_rest_of_a_turn_is_drawn_with_a_seed_of_its_own() -> None:
    request = Request(3, (1, 2), (), SamplingParams(10, 0.7, seed=5))

    def part(n: int) -> Generation:
        return Generation((9,) * n, (-1.0,) * n, (0,) * n, StopReason.INTERRUPTED)

    assert request.after(part(0)) is request
    rests: list[Any] = [request.after(part(n)) for n in (1, 2, 3)]
    assert [rest.token_ids for rest in rests] == [(1, 2, 9), (1, 2, 9, 9), (1, 2, 9, 9, 9)]
    assert [rest.sampling.max_new_tokens for rest in rests] == [9, 8, 7]
    assert len({request.sampling.seed, *(rest.sampling.seed for rest in rests)}) == 4
    assert {rest.sampling.temperature for rest in rests} == {0.7}
