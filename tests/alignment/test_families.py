"""Every family of `model/families`: engine, learner and plain transformers agree, before and after training."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_vlrl import kernels
from npu_vlrl.config import AlgorithmConfig, CriticConfig, LoraConfig, OptimConfig
from npu_vlrl.data.processor import read_settings
from npu_vlrl.kernels import modules, table
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.model.families import FAMILIES
from npu_vlrl.model.folder import export_model
from npu_vlrl.model.images import TransformersImages, transformers_images
from npu_vlrl.types import Sample, Segment
from npu_vlrl.workflow.export import export
from tests.support.episodes import Stage, an_image, long_episode
from tests.support.learning import assign_advantages
from tests.support.models import is_vision, load, loaded, plain_model, plain_patches, tiny_folder
from tests.support.scoring import engine_logprobs, largest_gap, learner_logprobs, plain_logprobs, with_image

TOLERANCE = 1e-5
"""Nats, in float32; sums are taken in another order."""
VISIBLE = 1e-4


class Scene:
    """Episodes of three turns, where images come with the question and with a tool's result, and of one turn."""

    def __init__(self, kind: str) -> None:
        self.kind, self.folder = kind, tiny_folder(kind)
        self.stage = Stage(loaded(self.folder))
        trajectories = self.stage.play(long_episode(kind), members=2)
        self.samples = export(trajectories, "concat", "best", 1.0, "test")
        self.engine = engine_logprobs(self.samples)

    def learner(self, samples: list[Sample] | None = None) -> Any:
        return learner_logprobs(self.stage.policy, self.stage.vision, samples or self.samples)


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


@pytest.mark.parametrize("side", ["left", "right"])
def test_engine_learner_and_transformers_agree(scene: Scene, side: str) -> None:
    assert sorted({len(sample.trained) for sample in scene.samples}) == [1, 3]
    assert any(sample.images for sample in scene.samples) is is_vision(scene.kind)
    learner = scene.learner()
    assert largest_gap(learner, scene.engine) < TOLERANCE
    n_tokens = len(scene.stage.loaded.tokenizer)
    plain = plain_logprobs(scene.folder, scene.samples, 1.0, side, n_tokens)
    assert largest_gap(plain, learner) < TOLERANCE


def test_a_changed_input_shows(scene: Scene) -> None:
    """A block of an image, or a word of a text-only prompt."""
    sample = scene.samples[0]
    if is_vision(scene.kind):
        rgb = sample.images[1].image.rgb.copy()
        rgb[8:22, 4:18] = 255 - rgb[8:22, 4:18]
        changed = with_image(sample, 1, rgb, scene.stage.policy.special)
    else:
        prompt = sample.segments[0]
        ids = (*prompt.token_ids[:-4], prompt.token_ids[0], *prompt.token_ids[-3:])
        other: Segment = dataclasses.replace(prompt, token_ids=ids, special=scene.stage.policy.special)
        changed = dataclasses.replace(sample, segments=(other, *sample.segments[1:]))
    found, expected = (values[sample.id] for values in (scene.learner([changed]), scene.engine))
    assert largest_gap({"": found}, {"": expected}) > VISIBLE


@pytest.mark.parametrize("size", [(60, 100), (112, 40), (28, 28), (300, 30), (9, 200), (400, 333)])
def test_images_are_those_of_transformers(scene: Scene, size: tuple[int, int]) -> None:
    """Bit for bit, whichever implementation the family takes."""
    processor, family = scene.stage.loaded.processor, scene.stage.policy.family
    if processor is None:
        assert family.vision is None
        return
    facts = family.vision
    assert facts is not None and isinstance(processor, TransformersImages) is not facts.fast_images
    image = processor.describe(an_image(*size, seed=7))
    if facts.fast_images:  # transformers' own, which a family without the fact would have
        read = read_settings(scene.folder)
        assert read is not None
        slow = transformers_images(scene.folder, family, *read)
        assert slow.describe(image.image) == image
        assert torch.equal(slow.patches(image), processor.patches(image))
    grids_N3 = torch.tensor([image.grid])
    found = family.tower_inputs(processor.patches(image), grids_N3)
    expected = plain_patches(scene.folder, [image.image.rgb])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert image.n_tokens == len(scene.stage.vision.fixed([image])[0])


@pytest.mark.parametrize("heeded", [True, False])
def test_kernels_take_only_what_they_compute(scene: Scene, monkeypatch: pytest.MonkeyPatch, heeded: bool) -> None:
    """Every part is replaced by a reference, and GLM has parts that only look like what is replaced."""
    for name in ("rms_norm", "swiglu", "patch_embed", "add_at", "rotary"):
        monkeypatch.setitem(table._table[name], "cuda", partial(table.reference_of(name)))
    monkeypatch.setattr(modules, "_patched_files", set())
    monkeypatch.setattr(modules, "_dispatching", lambda original, rotate: partial(_rotated, rotate))
    for file in {type(module).__module__ for module in scene.stage.policy.model.modules()}:
        for name in modules._ROTATIONS.keys() & vars(sys.modules[file]).keys():
            monkeypatch.setattr(sys.modules[file], name, getattr(sys.modules[file], name))  # so that it is put back
    family = scene.stage.policy.family
    if not heeded:
        monkeypatch.setattr(type(family), "unlike", family.unlike & {"apply_rotary_pos_emb"})  # else it raises
    kernels.use("cuda")
    try:
        stage = Stage(load(scene.folder))
        found = learner_logprobs(stage.policy, stage.vision, scene.samples)
    finally:
        kernels.use("reference")
    wrong = scene.kind == "glm4v" and not heeded
    assert (largest_gap(found, scene.engine) > VISIBLE) is wrong


def _rotated(rotate: Any, q: Any, k: Any, cos: Any, sin: Any, *sections: Any, **_: Any) -> tuple[Any, Any]:
    return rotate(q, cos, sin, *sections), rotate(k, cos, sin, *sections)


TRAINED: dict[str, dict[str, Any]] = {
    "whole, with a critic": {},
    "frozen tower": {"freeze_vision": True},
    "adapter": {"lora": LoraConfig(rank=2, alpha=4.0)},
}


@pytest.mark.parametrize("how", TRAINED)
def test_trained_exported_and_read_again(scene: Scene, how: str, tmp_path: Path) -> None:
    """What learned, what did not, and that engine, export and plain transformers have the new weights."""
    stage = Stage(load(scene.folder, **TRAINED[how]))
    policy = stage.policy
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    metrics = train(stage, scene.samples, "critic" in how)
    assert metrics["skipped_updates"] == 0 and ("critic/value_loss" in metrics) is ("critic" in how)
    tower = set() if policy.vision is None else {id(p) for p in policy.vision.parameters()}
    for name, parameter in policy.model.named_parameters():
        learns = "lora_" in name if how == "adapter" else how != "frozen tower" or id(parameter) not in tower
        assert torch.equal(parameter, before[name]) is not learns, name

    stage.engine.weights_changed(1)
    samples = export(stage.play(long_episode(scene.kind), members=2, seed=1), "concat", "best", 1.0, "test")
    learner = learner_logprobs(policy, stage.vision, samples)
    assert largest_gap(learner, engine_logprobs(samples)) < TOLERANCE
    assert largest_gap(learner, scene.learner(samples)) > VISIBLE  # the weights of before say something else

    out = tmp_path / "export"
    export_model(stage.loaded, out)
    again = Stage(load(out))
    assert again.loaded.processor == stage.loaded.processor
    assert largest_gap(learner_logprobs(again.policy, again.vision, samples), learner) < TOLERANCE
    n_tokens = len(stage.loaded.tokenizer)
    plain = plain_logprobs(scene.folder, samples, 1.0, "left", n_tokens, plain_model(out))
    assert largest_gap(plain, learner) < TOLERANCE


def train(stage: Stage, samples: list[Sample], with_critic: bool) -> dict[str, float]:
    """Two steps; the metrics of the last one."""
    advantage = {"preset": "trico"} if with_critic else {}
    config = AlgorithmConfig(**advantage, kl_coef=0.0, max_logprob_gap=1e6)  # of the second step: the tokens are older
    optim = OptimConfig(lr=1e-3, micro_batch_tokens=4096)
    algorithm = config.resolved()
    learner = Learner(stage.policy, stage.vision, algorithm, optim, 1.0, 10, CriticConfig(lr=1e-2))
    numbered = [dataclasses.replace(s, reward=float(i), outcome=float(i)) for i, s in enumerate(samples)]
    metrics: dict[str, float] = {}
    for _ in range(2):
        metrics = learner.step(assign_advantages(learner.score(numbered), algorithm))
    return metrics
