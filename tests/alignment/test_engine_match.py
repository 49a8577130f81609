"""Engine, learner and plain transformers agree on every sampled token of whole episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.types import EpisodeStatus, Sample, StopReason, Task, Trajectory
from npu_vlrl.workflow.export import export
from tests.support.episodes import Reply, Stage, an_image, long_episode, task, task_lists
from tests.support.models import KINDS, is_vision, loaded, qwen_folder, tiny_folder
from tests.support.scoring import STYLES, TOLERANCE, engine_logprobs, largest_gap, learner_logprobs, plain_logprobs

temperatures = st.sampled_from([1.0, 0.7, 1.3])


def check_tokens(stage: Stage, trajectories: Sequence[Trajectory]) -> None:
    """Contexts and actions are what went through the engine, id for id, and nothing that it returned is missing."""
    contexts = {tuple(ids): stage.recorder.returned[seed] for seed, ids in stage.recorder.asked.items()}
    seen = []
    for trajectory in trajectories:
        assert trajectory.status is EpisodeStatus.SOLVED, trajectory.error
        assert len(trajectory.turns) == len(trajectory.task.extra["script"]) + 1
        for turn in trajectory.turns:
            ids = [token for segment in turn.context for token in segment.token_ids]
            assert tuple(ids) in contexts
            seen.append((tuple(ids), turn.action.token_ids, turn.action.logprobs))
            assert stage.policy.special.placeholders.isdisjoint(turn.action.token_ids)
            assert all(token < stage.policy.n_tokens for token in turn.action.token_ids)
            ended = turn.action.token_ids[-1] in stage.policy.special.end_of_turn
            assert turn.action.stop_reason is (StopReason.END_OF_TURN if ended else StopReason.TURN_BUDGET)
    sent = [
        (tuple(ids), stage.recorder.returned[seed].token_ids, stage.recorder.returned[seed].logprobs)
        for seed, ids in stage.recorder.asked.items()
    ]
    assert sorted(sent) == sorted(seen)


def check_masks(trajectories: Sequence[Trajectory], concat: Sequence[Sample], individual: Sequence[Sample]) -> None:
    """True exactly where an action lies, counted from the lengths of the contexts alone."""
    alone = iter(individual)
    for trajectory, whole in zip(trajectories, concat, strict=True):
        sampled: set[int] = set()
        for turn in trajectory.turns:
            start = sum(len(segment.token_ids) for segment in turn.context)
            here = set(range(start, start + len(turn.action.token_ids)))
            sampled |= here
            single = next(alone)
            assert {i for i, trained in enumerate(single.loss_mask) if trained} == here
            assert single.token_ids == whole.token_ids[: len(single)]
        assert {i for i, trained in enumerate(whole.loss_mask) if trained} == sampled
        assert len(whole.behaviour_logprobs) == len(sampled)


def check_episode(
    folder: Path, tasks: list[Task], turn_tokens: int, temperature: float, budget: int, seed: int
) -> list[Trajectory]:
    stage = Stage(loaded(folder))
    trajectories = stage.play(tasks, turn_tokens=turn_tokens, temperature=temperature, seed=seed)
    check_tokens(stage, trajectories)
    samples = {style: export(trajectories, style, "best", 1.0, "test") for style in STYLES}
    check_masks(trajectories, samples["concat"], samples["individual"])
    for style in STYLES:
        shuffled = random.Random(seed).sample(samples[style], len(samples[style]))
        engine = engine_logprobs(shuffled)
        learner = learner_logprobs(stage.policy, stage.vision, shuffled, temperature, budget)
        assert largest_gap(learner, engine) < TOLERANCE
    n_tokens = len(stage.loaded.tokenizer)
    side = "left" if seed % 2 else "right"
    some = shuffled[:6]
    padded = plain_logprobs(folder, some, temperature, side, n_tokens)
    assert largest_gap(padded, engine_logprobs(some)) < TOLERANCE
    return trajectories


@pytest.mark.parametrize("kind", KINDS)
def test_every_action_token(kind: str) -> None:
    @settings(max_examples=20)
    @given(
        tasks=task_lists(is_vision(kind)),
        turn_tokens=st.integers(1, 8),
        temperature=temperatures,
        budget=st.sampled_from([1, 90, 300, 4096]),
        seed=st.integers(0, 2**16),
    )
    def check(tasks: list[Task], turn_tokens: int, temperature: float, budget: int, seed: int) -> None:
        check_episode(tiny_folder(kind), tasks, turn_tokens, temperature, budget, seed)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_real_vocabulary_and_template(kind: str) -> None:
    @settings(max_examples=4)
    @given(tasks=task_lists(is_vision(kind), max_turns=3), temperature=temperatures, seed=st.integers(0, 2**16))
    def check(tasks: list[Task], temperature: float, seed: int) -> None:
        check_episode(qwen_folder(kind), tasks, 5, temperature, 4096, seed)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_padded_and_one_by_one(kind: str) -> None:
    folder = tiny_folder(kind)
    stage = Stage(loaded(folder))
    samples = export(stage.play(long_episode(kind), members=2), "individual", "best", 1.0, "test")
    together = learner_logprobs(stage.policy, stage.vision, samples)
    for budget in (1, 100, 250):
        assert largest_gap(learner_logprobs(stage.policy, stage.vision, samples, budget=budget), together) < TOLERANCE
    n_tokens = len(stage.loaded.tokenizer)
    for side in ("left", "right"):
        assert largest_gap(plain_logprobs(folder, samples, 1.0, side, n_tokens), together) < TOLERANCE
    alone = {k: v for s in samples for k, v in plain_logprobs(folder, [s], 1.0, "right", n_tokens).items()}
    assert largest_gap(alone, together) < TOLERANCE


def test_the_models_make_both_kinds_of_turns() -> None:
    """The properties above would be weak if turns were never cut, or always."""
    for kind in KINDS:
        trajectories = Stage(loaded(tiny_folder(kind))).play(long_episode(kind), members=8)
        reasons = [turn.action.stop_reason for trajectory in trajectories for turn in trajectory.turns]
        assert 5 < reasons.count(StopReason.END_OF_TURN) < len(reasons) - 5


@pytest.mark.parametrize("template", ["qwen3_5_think", "qwen3_vl_thinking"])
@pytest.mark.parametrize("style", STYLES)
def test_a_template_that_rewrites_history(style: str, template: str) -> None:
    """Individual samples carry each turn's own context; one sequence for the episode does not exist."""
    folder = qwen_folder("qwen3_vl", template)
    stage = Stage(loaded(folder))
    tasks = [task("t", [an_image(64, 64, 1), "up?"], Reply("seen", (an_image(40, 90, 2),)), Reply("no"))]
    trajectories = stage.play(tasks, members=4)
    check_tokens(stage, trajectories)
    rewritten = [trajectory.rewritten_turn() is not None for trajectory in trajectories]
    # Qwen3-VL's goes on after a thought that has no end, or the white space that it writes itself
    assert all(rewritten) or (template == "qwen3_vl_thinking" and any(rewritten))
    if style == "concat":
        with pytest.raises(ValueError, match=rf"{template} rewrote the history before turn \d"):
            export(trajectories, "concat", "best", 1.0, template)
        return
    samples = export(trajectories, "individual", "best", 1.0, "test")
    assert [sum(sample.loss_mask) for sample in samples] == [len(t.action) for tr in trajectories for t in tr.turns]
    engine = engine_logprobs(samples)
    assert largest_gap(learner_logprobs(stage.policy, stage.vision, samples), engine) < TOLERANCE
    plain = plain_logprobs(folder, samples, 1.0, "left", len(stage.loaded.tokenizer))
    assert largest_gap(plain, engine) < TOLERANCE
