"""The alignment check fails when something is wrong: each test breaks one thing and sees the gap open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from npu_vlrl.kernels.tree import Tree
from npu_vlrl.learner.pack import MicroBatch
from npu_vlrl.learner.trainer import LearnerError
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.types import Image, ImageInput, Sample, Segment, SegmentKind
from npu_vlrl.workflow.export import export
from tests.support.episodes import Reply, Stage, an_image, long_episode, task
from tests.support.learning import with_advantage
from tests.support.models import KINDS, VISION_KINDS, load, loaded, tiny_folder
from tests.support.scoring import (
    STYLES,
    TOLERANCE,
    engine_logprobs,
    largest_gap,
    learner_logprobs,
    make_learner,
    with_image,
)

VISIBLE = 1e-4


class Scene:
    """An episode of three turns with four images: two in the prompt, two from a tool after the first turn."""

    def __init__(self, kind: str, fresh: bool = False) -> None:
        self.stage = Stage((load if fresh else loaded)(tiny_folder(kind)))
        self.trajectories = self.stage.play(long_episode(kind)[:1], members=1)
        (self.sample,) = export(self.trajectories, "concat", "best", 1.0, "test")
        self.engine = engine_logprobs([self.sample])
        self.special = self.stage.policy.special

    def gap(self, sample: Sample | None = None, change: Callable[[MicroBatch], MicroBatch] = lambda b: b) -> float:
        changed = [sample or self.sample]
        return largest_gap(learner_logprobs(self.stage.policy, self.stage.vision, changed, change=change), self.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_broken(kind: str) -> None:
    assert Scene(kind).gap() < TOLERANCE


# Images


@pytest.mark.parametrize("kind", VISION_KINDS)
@pytest.mark.parametrize("number", range(4))
def test_one_block_of_any_image_matters_to_later_actions_only(kind: str, number: int) -> None:
    scene = Scene(kind)
    rgb = scene.sample.images[number].image.rgb.copy()
    rgb[8:22, 4:18] = 255 - rgb[8:22, 4:18]
    changed = with_image(scene.sample, number, rgb, scene.special)
    values = learner_logprobs(scene.stage.policy, scene.stage.vision, [changed])[changed.id]
    lengths = [len(scene.sample.segments[i]) for i in scene.sample.trained]
    gaps = (values - scene.engine[changed.id]).abs().split(lengths)
    first_to_see = 0 if number < 2 else 1  # the tool answered turn 0
    for turn, gap in enumerate(gaps):
        if turn < first_to_see:
            assert gap.max() < TOLERANCE
        else:
            assert gap.max() > VISIBLE, f"turn {turn} does not see image {number}"


class NoPixels:
    """Gives every image the same grey patches."""

    def __init__(self, width: int) -> None:
        self.width = width

    def patches(self, image: ImageInput) -> torch.Tensor:
        return torch.zeros(image.grid[0] * image.grid[1] * image.grid[2], self.width)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_a_run_that_lost_its_pixels_does_not_pass(kind: str) -> None:
    scene = Scene(kind)
    processor = scene.stage.loaded.processor
    assert processor is not None
    width = processor.patches(scene.sample.images[0]).shape[1]
    blind = VisionFeatures(scene.stage.policy, NoPixels(width), 0)
    assert largest_gap(learner_logprobs(scene.stage.policy, blind, [scene.sample]), scene.engine) > 100 * VISIBLE
    with pytest.raises(LearnerError, match="images"):
        make_learner(scene.stage.policy, blind).step([with_advantage(scene.sample, 1.0)])


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_images_in_another_order(kind: str) -> None:
    same_size = (an_image(60, 60, 1), an_image(60, 60, 2))
    scene = Scene(kind)
    trajectories = scene.stage.play([task("t", [*same_size, "which?"])], members=1, seed=5)
    (sample,) = export(trajectories, "concat", "best", 1.0, "test")

    def swap(batch: MicroBatch) -> MicroBatch:
        assert batch.image_order == (0, 1)
        return dataclasses.replace(batch, image_order=(1, 0))

    engine = engine_logprobs([sample])
    assert largest_gap(learner_logprobs(scene.stage.policy, scene.stage.vision, [sample]), engine) < TOLERANCE
    swapped = learner_logprobs(scene.stage.policy, scene.stage.vision, [sample], change=swap)
    assert largest_gap(swapped, engine) > VISIBLE


# Masks, tokens, positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one(kind: str, shift: int) -> None:
    def shifted(batch: MicroBatch) -> MicroBatch:
        trained = (batch.before_N + shift).clamp(max=len(batch.token_ids_T) - 2)
        return dataclasses.replace(batch, before_N=trained, target_ids_N=batch.token_ids_T[trained + 1])

    assert Scene(kind).gap(change=shifted) > VISIBLE


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_newline_after_the_turn(kind: str) -> None:
    scene = Scene(kind)
    newline = scene.stage.loaded.tokenizer.encode("\n", add_special_tokens=False)[0]
    segments: list[Segment] = []
    dropped = 0
    for segment in scene.sample.segments:
        if segment.kind is SegmentKind.OBSERVATION:
            at = segment.token_ids.index(newline)
            assert at <= 1  # behind the closing token, where the turn was cut
            ids = (*segment.token_ids[:at], *segment.token_ids[at + 1 :])
            segment = dataclasses.replace(segment, token_ids=ids, special=scene.special)
            dropped += 1
        segments.append(segment)
    assert dropped == 2
    assert scene.gap(dataclasses.replace(scene.sample, segments=tuple(segments))) > VISIBLE


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_positions_that_count_tokens(kind: str) -> None:
    def counted(batch: MicroBatch) -> MicroBatch:
        positions = torch.arange(len(batch.token_ids_T)).expand(3, -1)
        return dataclasses.replace(batch, position_ids_3T=positions)

    assert Scene(kind).gap(change=counted) > VISIBLE


@pytest.mark.parametrize("kind", KINDS)
def test_packed_samples_that_see_each_other(kind: str) -> None:
    scene = Scene(kind)
    trajectories = scene.stage.play(long_episode(kind)[:1], members=2, seed=1)
    samples = export(trajectories, "concat", "best", 1.0, "test")
    engine = engine_logprobs(samples)
    assert largest_gap(learner_logprobs(scene.stage.policy, scene.stage.vision, samples), engine) < TOLERANCE

    def one_sequence(batch: MicroBatch) -> MicroBatch:
        return dataclasses.replace(batch, tree=Tree.of_sequences((0, batch.tree.bounds[-1])))

    values = learner_logprobs(scene.stage.policy, scene.stage.vision, samples, change=one_sequence)
    assert largest_gap(values, engine) > VISIBLE


# Weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("told", [True, False])
def test_weights_that_change_between_turns(kind: str, told: bool) -> None:
    """An engine that was not told continues from keys and values of the old weights."""
    stage = Stage(load(tiny_folder(kind)))
    workflow_turns = iter(range(10))

    def change_weights(*_: object) -> None:
        if next(workflow_turns) == 0:
            with torch.no_grad():
                for parameter in stage.policy.text.parameters():
                    parameter.mul_(1.1)
            if told:
                stage.engine.weights_changed(7)

    stage.renderer.reply = _before(stage.renderer.reply, change_weights)  # type: ignore[method-assign]
    trajectories = stage.play([task("t", ["Up or down?"], Reply("no"))], members=1)
    first, second = export(trajectories, "individual", "best", 1.0, "test")
    values = learner_logprobs(stage.policy, stage.vision, [first, second])
    assert largest_gap({"": values[first.id]}, {"": engine_logprobs([first])[first.id]}) > VISIBLE
    gap = largest_gap({"": values[second.id]}, {"": engine_logprobs([second])[second.id]})
    assert gap < TOLERANCE if told else gap > VISIBLE
    assert set(first.weight_versions) == {0}
    assert set(second.weight_versions) == {7 if told else 0}


def _before(function: Callable, first: Callable) -> Callable:
    def both(*arguments: object) -> object:
        first()
        return function(*arguments)

    return both


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_the_same_image_before_and_after_the_tower_changed(kind: str) -> None:
    stage = Stage(load(tiny_folder(kind)))
    tasks = [task("t", [an_image(60, 60, 1), "up?"])]
    old = export(stage.play(tasks), "concat", "best", 1.0, "test")
    assert stage.policy.vision is not None
    with torch.no_grad():
        for parameter in stage.policy.vision.parameters():
            parameter.mul_(1.2)
    stage.engine.weights_changed(1)
    new = export(stage.play(tasks, seed=1), "concat", "best", 1.0, "test")
    for samples, limit_holds in ((new, True), (old, False)):
        gap = largest_gap(learner_logprobs(stage.policy, stage.vision, samples), engine_logprobs(samples))
        assert (gap < TOLERANCE) is limit_holds


# Both exports


@pytest.mark.parametrize("kind", KINDS)
def test_both_exports_give_each_token_the_same_logprob(kind: str) -> None:
    stage = Stage(loaded(tiny_folder(kind)))
    trajectories = stage.play(long_episode(kind, turns=4))
    values = {}
    for style in STYLES:
        samples = export(trajectories, style, "best", 1.0, "test")
        scored = learner_logprobs(stage.policy, stage.vision, samples, budget=250)
        values[style] = torch.cat([scored[sample.id] for sample in samples])
    assert len(values["concat"]) == sum(len(turn.action) for tr in trajectories for turn in tr.turns)
    torch.testing.assert_close(values["concat"], values["individual"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_both_exports_give_the_same_gradient(kind: str) -> None:
    """In float64, with a weight for each token that is the same in both."""
    stage = Stage(load(tiny_folder(kind)))
    trajectories = stage.play(long_episode(kind), members=1)
    stage.policy.model.double()
    stage.engine.weights_changed(1)
    gradients = {}
    for style in STYLES:
        samples = export(trajectories, style, "best", 1.0, "test")
        learner = make_learner(stage.policy, stage.vision, budget=150)
        counts = {sample.id: sum(sample.loss_mask) for sample in samples}
        weights = torch.linspace(-1, 2, sum(counts.values()), dtype=torch.float64).split(list(counts.values()))
        weight_of = dict(zip(counts, weights, strict=True))
        batches = learner._micro_batches(samples)
        assert len(batches) > 1
        for batch in batches:
            logprobs_N, entropy_N = learner._score(batch, stage.policy, stage.vision, 1.0)
            weights_N = torch.cat([weight_of[i] for i in batch.sample_ids])
            (weights_N * (logprobs_N + 0.1 * entropy_N)).sum().backward()
        gradients[style] = {name: p.grad.clone() for name, p in stage.policy.trainable().items() if p.grad is not None}
        stage.policy.model.zero_grad()
    assert gradients["concat"].keys() == gradients["individual"].keys() == stage.policy.trainable().keys()
    total = torch.stack([gradient.norm() for gradient in gradients["concat"].values()]).norm()
    for name, gradient in gradients["concat"].items():
        # the models' norms and rotations compute in float32 whatever the weights are
        limit = 1e-5 * gradient.norm() + 1e-7 * total
        assert (gradients["individual"][name] - gradient).norm() < limit, name
        assert gradient.norm() > 10 * limit, f"{name} gets no gradient"


def test_a_changed_image_is_another_image() -> None:
    """`with_image`, which the tests above rely on, changes exactly one of them."""
    scene = Scene("qwen2_5_vl")
    changed = with_image(scene.sample, 2, np.zeros_like(scene.sample.images[2].image.rgb), scene.special)
    same = [a.image == b.image for a, b in zip(changed.images, scene.sample.images, strict=True)]
    assert same == [True, True, False, True]
    assert changed.images[2].image == Image(np.zeros_like(scene.sample.images[2].image.rgb))
