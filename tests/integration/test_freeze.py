"""A frozen vision tower: no gradient, no graph, no change, and one run for each distinct picture."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.load import LoadedModel
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.train_loop import train
from npu_vlrl.training.run import Run
from tests.support.learning import Probe, distance, load, make_learner, plain_model, samples_of, tiny_folder
from tests.support.runs import lines, small_config

torch.set_num_threads(1)

KINDS = ["qwen2_5_vl", "qwen3_vl"]


def tower(loaded: LoadedModel) -> dict[str, Tensor]:
    assert loaded.policy.vision is not None
    return {name: p.detach().clone() for name, p in loaded.policy.vision.roots[0].named_parameters()}


def watch(loaded: LoadedModel) -> list[tuple[int, bool]]:
    """Pictures of each run of the tower, and whether autograd was recording."""
    runs: list[tuple[int, bool]] = []

    def note(_: Any, args: Any, named: dict[str, Any]) -> None:
        runs.append((len(named["grid_thw"]), torch.is_grad_enabled()))

    assert loaded.policy.vision is not None
    loaded.policy.vision.roots[0].register_forward_pre_hook(note, with_kwargs=True)
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_each_distinct_picture_goes_through_the_tower_once_and_without_a_graph(kind: str) -> None:
    loaded = load(kind, freeze_vision=True)
    runs = watch(loaded)
    learner = make_learner(loaded, micro_batch_tokens=50)
    for _ in range(3):
        learner.step(samples_of(loaded))
    assert sum(pictures for pictures, _ in runs) == 3  # of five occurrences, in three steps
    assert not any(recording for _, recording in runs)
    for features in learner.vision.differentiable(samples_of(loaded)[0].images):
        assert not features.requires_grad and features.grad_fn is None


def test_a_trained_tower_runs_with_a_graph_in_every_step() -> None:
    """The two checks above can fail."""
    loaded = load()
    before = tower(loaded)
    runs = watch(loaded)
    learner = make_learner(loaded, lr=1e-2)
    for _ in range(2):
        learner.step(samples_of(loaded))
    assert [pictures for pictures, _ in runs] == [3, 3] and all(recording for _, recording in runs)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in tower(loaded).items() if "weight" in name)


def test_without_room_for_features_they_are_computed_again_and_equal() -> None:
    loaded = load(freeze_vision=True)
    runs = watch(loaded)
    learner = make_learner(loaded, kind=Probe)
    kept = learner.measure(samples_of(loaded))
    learner.vision = VisionFeatures(loaded.policy, loaded.processor, cache_bytes=0)
    for _ in range(2):
        assert distance(learner.measure(samples_of(loaded)), kept) < 1e-6
    assert [pictures for pictures, _ in runs] == [3, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_gradients_are_those_of_a_tower_that_could_be_trained(kind: str) -> None:
    samples = samples_of(load(kind))
    frozen, free = (make_learner(load(kind, freeze_vision=flag), kind=Probe) for flag in (True, False))
    images = samples[3].images
    for a, b in zip(frozen.vision.differentiable(images), free.vision.differentiable(images), strict=True):
        assert torch.equal(a, b) and b.requires_grad
    ours, all_of_them = frozen.measure(samples), free.measure(samples)
    assert distance(ours, {name: all_of_them[name] for name in ours}) < 1e-6
    assert frozen.loss == pytest.approx(free.loss, rel=1e-6)
    assert all_of_them.keys() - ours.keys() == {n for n in all_of_them if ".visual." in n}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_pictures_trains_the_rest(kind: str) -> None:
    loaded = load(kind)
    learner: Learner = make_learner(loaded, kind=Probe)
    gradient = learner.measure(samples_of(loaded, with_images=False))  # type: ignore[attr-defined]
    assert gradient and not any(".visual." in name for name in gradient)
    before = tower(loaded)
    stepping = make_learner(loaded, lr=1e-2)
    assert stepping.step(samples_of(loaded, with_images=False))["skipped_updates"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower(loaded).items())
    assert stepping.step(samples_of(loaded))["skipped_updates"] == 0  # a batch with pictures after that one
    assert any(not torch.equal(tensor, before[name]) for name, tensor in tower(loaded).items())


def test_a_whole_run(tmp_path: Path) -> None:
    """The tower of the exported model is the one that the run began with; the engine shares its features."""
    folder = tmp_path / "run"
    settings = {"model__freeze_vision": True, "run__checkpoint_every": 0, "train__steps": 3}
    train(small_config(folder, **settings))
    start, end = plain_model(tiny_folder()), plain_model(folder / "export")
    for (name, a), (_, b) in zip(start.named_parameters(), end.named_parameters(), strict=True):
        if ".visual." in name:
            assert torch.equal(a, b), name
    assert not torch.equal(start.lm_head.weight, end.lm_head.weight)
    trained = [line for line in lines(folder, "metrics.jsonl") if "grad_norm" in line]
    seen = [line["images_encoded"] for line in trained]
    # the card that covers every picture was encoded before; random episodes never call the tool
    assert seen[0] == seen[-1] and trained[-1]["images_referenced"] > trained[0]["images_referenced"]


def test_the_warm_start_leaves_no_features_behind(tmp_path: Path) -> None:
    """A run that is resumed after it has none; the features of an unbroken run are computed afresh as well."""
    events: list[str] = []

    def noted(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            events.append(name)
            return original(*arguments)

        return mock.patch.object(owner, name, call)

    with noted(Learner, "supervise"), noted(Learner, "forget_features"), noted(Run, "evaluate"):
        train(small_config(tmp_path / "run", train__steps=0, model__freeze_vision=True))
    after_the_guard = "forget_features"
    assert events == [
        *("supervise", "supervise", "forget_features"),
        *(after_the_guard, "evaluate", "forget_features", "evaluate"),
    ]
