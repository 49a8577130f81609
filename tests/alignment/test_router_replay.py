"""Router replay: the engine says which experts it chose, and the learner takes those."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_vlrl.engines.base import _joined
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.kernels import modules
from npu_vlrl.learner.pack import MicroBatch
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.types import Generation, Sample, Segment, SegmentKind, StopReason
from npu_vlrl.workflow.export import ExportStyle, export
from tests.support.episodes import RecordingEngine, Stage, long_episode
from tests.support.learning import Probe, make_learner
from tests.support.models import load, loaded, plain, tiny_folder
from tests.support.scoring import STYLES, TOLERANCE, engine_logprobs, largest_gap, learner_logprobs
from tests.support.scoring import make_learner as scoring_learner

torch.set_num_threads(1)

KIND = "qwen3_vl_moe"
L, K, E = 2, 2, 8
"""Layers, experts of a token, experts of the tiny model."""


def played(stage: Stage, style: ExportStyle = "concat", seed: int = 0) -> list[Sample]:
    return export(stage.play(long_episode(KIND), members=2, seed=seed), style, "best", 1.0, "test")


@contextmanager
def chosen_by(model: Any) -> Iterator[list[Tensor]]:
    """The experts [T, k] that each layer's experts were really asked for, pass by pass."""
    found: list[Tensor] = []

    def note(_: Any, arguments: Sequence[Any]) -> None:
        found.append(arguments[1].clone())

    hooks = [layer.mlp.experts.register_forward_pre_hook(note) for layer in model.model.language_model.layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def experts_of(routes: np.ndarray) -> np.ndarray:
    """Without an order: which expert of a token comes first is decided by the last bits, too."""
    return np.sort(routes, axis=-1)


def plain_routes(sample: Sample) -> np.ndarray:
    """[T, L, k] of plain transformers, on the whole sequence."""
    model, processor = plain(tiny_folder(KIND)), loaded(tiny_folder(KIND)).processor
    assert processor is not None
    ids = torch.tensor([sample.token_ids])
    inputs: dict[str, Any] = {"mm_token_type_ids": (ids == model.config.image_token_id).int()}
    if sample.images:
        inputs["pixel_values"] = torch.cat([processor.patches(image) for image in sample.images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in sample.images])
    with torch.no_grad(), chosen_by(model) as found:
        model(input_ids=ids, use_cache=False, **inputs)
    return torch.stack(found, 1).numpy()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cache_bytes", [2**34, 1], ids=["kept turns", "computed again"])
def test_every_token_but_the_last_has_the_experts_of_plain_transformers(style: ExportStyle, cache_bytes: int) -> None:
    stage = Stage(loaded(tiny_folder(KIND)))
    stage.engine.cache_bytes = cache_bytes
    samples = played(stage, style)
    assert {len(sample.trained) for sample in samples} == ({1, 3} if style == "concat" else {1})
    for sample in samples:
        routes = sample.routes
        assert routes is not None and routes.dtype == np.int16 and routes.shape == (len(sample), L, K)
        assert (routes[-1] == -1).all()
        assert np.array_equal(experts_of(routes[:-1]), experts_of(plain_routes(sample)[:-1]))
    assert len({tuple(routes) for s in samples if s.routes is not None for routes in s.routes[:-1, 0]}) > E


def test_interrupted_turns_keep_the_experts_of_their_tokens() -> None:
    """The parts of a turn say what the whole turn would."""

    class Interrupted(InProcessEngine):
        def sample(self, requests: Any) -> Any:
            self.looks = 0
            self.interrupted = self.heard
            return super().sample(requests)

        def heard(self) -> bool:
            self.looks += 1
            return self.looks > 2

    stage = Stage(loaded(tiny_folder(KIND)))
    engine = Interrupted(stage.policy, stage.vision)
    stage.engine, stage.recorder = engine, RecordingEngine(engine)
    for sample in played(stage):
        assert sample.routes is not None
        assert np.array_equal(experts_of(sample.routes[:-1]), experts_of(plain_routes(sample)[:-1]))


@pytest.mark.parametrize(("first", "second", "expected"), [(3, 3, [0, 1, 2, 5]), (3, 4, [3, 4, 4, 5])])
def test_tokens_that_were_computed_again(first: int, second: int, expected: list[int]) -> None:
    """They keep the experts that sampled them, unless the weights have changed."""
    special = loaded(tiny_folder(KIND)).policy.special

    def action(rows: list[int], version: int) -> Segment:
        routes = np.array(rows, np.int16)[:, None, None]
        return Segment(
            SegmentKind.ACTION,
            (7,),
            special,
            logprobs=(-1.0,),
            weight_versions=(version,),
            stop_reason=StopReason.END_OF_TURN,
            routes=routes,
        )

    prompt, reply = (Segment(kind, (5, 6), special) for kind in (SegmentKind.PROMPT, SegmentKind.OBSERVATION))
    segments = (prompt, action([0, 1], first), reply, action([3, 4, 2 if first == second else 4, 5, 6], second))
    sample = Sample("a", "a", segments, (1, 3), 0.0, 0.0, "a")
    assert sample.routes is not None
    assert sample.routes[:4, 0, 0].tolist() == expected and sample.routes[4:, 0, 0].tolist() == [6, -1]


@pytest.mark.parametrize(("version", "expected"), [(1, [0, 1, 2, 9]), (2, [5, 6, 7, 9])])
def test_parts_of_a_turn_that_were_computed_again(version: int, expected: list[int]) -> None:
    def part(rows: list[int], ids: tuple[int, ...], version: int) -> Generation:
        routes = np.array(rows, np.int16)[:, None, None]
        return Generation(ids, (-1.0,) * len(ids), (version,) * len(ids), StopReason.INTERRUPTED, routes)

    whole = _joined(part([0, 1, 2], (7, 8), 1), part([5, 6, 7, 9], (4,), version))
    assert whole.routes is not None and whole.routes[:, 0, 0].tolist() == expected


def test_in_bfloat16_evicted_turns_are_replayed_by_the_experts_that_sampled(tmp_path: Path) -> None:
    """Without room for kept keys and values each turn computes its context again, and in 16 bits otherwise."""
    folder = write_tiny_model(KIND, tmp_path / "model", seed=0, hidden=64, layers=8)
    differ = 0
    for seed in range(3):
        stage = Stage(load(folder, dtype="bfloat16"))
        stage.engine.cache_bytes = 1
        for sample in played(stage, seed=seed):
            assert sample.routes is not None
            end = 0
            for i, segment in enumerate(sample.segments):
                end += len(segment)
                if i in sample.trained:  # what the token before each sampled one met decided what was drawn
                    assert segment.routes is not None
                    own = slice(end - 1 - len(segment), end - 1)
                    assert np.array_equal(sample.routes[own], segment.routes[-len(segment) :])
                    again = [
                        later.routes[: end - 1][own] for later in sample.segments[i + 1 :] if later.routes is not None
                    ]
                    differ += sum(
                        not np.array_equal(experts_of(rows), experts_of(sample.routes[own])) for rows in again
                    )
    assert differ > 0, "otherwise nothing was tested"


def without_replay(batch: MicroBatch) -> MicroBatch:
    return dataclasses.replace(batch, routes_TLk=None)


def test_in_bfloat16_tokens_meet_other_experts_without_replay_and_the_same_with_it(tmp_path: Path) -> None:
    """By what the experts are asked for. A choice is that of one token in one layer."""
    folder = write_tiny_model(KIND, tmp_path / "model", seed=0, hidden=64, layers=8)
    stage = Stage(load(folder, dtype="bfloat16"))
    samples = played(stage)
    learner = scoring_learner(stage.policy, stage.vision)
    differ, choices = {True: 0, False: 0}, 0
    for batch in learner._micro_batches(samples):
        assert batch.routes_TLk is not None
        engine_TLk = batch.routes_TLk.long()
        known_T = engine_TLk[:, 0, 0] >= 0
        choices += 8 * int(known_T.sum())
        for replayed, tried in ((True, batch), (False, without_replay(batch))):
            with torch.no_grad(), chosen_by(stage.policy.base) as found:
                learner._score(tried, stage.policy, stage.vision, 1.0)
            differs_TL = (torch.stack(found, 1).sort(-1).values != engine_TLk.sort(-1).values).any(-1)
            differ[replayed] += int(differs_TL[known_T].sum())
    assert differ[True] == 0 < differ[False] < 0.1 * choices
    engine = engine_logprobs(samples)
    gaps = [
        largest_gap(learner_logprobs(stage.policy, stage.vision, samples, change=change), engine)
        for change in (lambda batch: batch, without_replay)
    ]
    assert 2 * gaps[0] < gaps[1], gaps


def test_what_is_replayed_is_heard() -> None:
    """With the experts of another token the learner's log-probabilities are far from the engine's."""
    stage = Stage(loaded(tiny_folder(KIND)))
    samples = played(stage)

    def other_experts(batch: MicroBatch) -> MicroBatch:
        assert batch.routes_TLk is not None
        routes = batch.routes_TLk
        return dataclasses.replace(batch, routes_TLk=torch.where(routes < 0, routes, 7 - routes))

    engine = engine_logprobs(samples)
    assert largest_gap(learner_logprobs(stage.policy, stage.vision, samples), engine) < TOLERANCE
    wrong = learner_logprobs(stage.policy, stage.vision, samples, change=other_experts)
    assert largest_gap(wrong, engine) > 1e-2


class _Measured(Probe):
    """A learner that also keeps the metrics of its last step."""

    def step(self, *arguments: Any, **options: Any) -> dict[str, float]:
        self.metrics = super().step(*arguments, **options)
        return self.metrics


def updated(samples: Sequence[Sample], **settings: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of an update by the names of parameters, and its metrics."""
    learner = make_learner(load(tiny_folder(KIND), **settings), kind=_Measured)
    numbered = [dataclasses.replace(s, reward=float(i), outcome=float(i)) for i, s in enumerate(samples)]
    scored = learner.algorithm.with_credit(learner.score(numbered))[0]
    return learner.measure(scored), learner.metrics


def with_routes(samples: Sequence[Sample], change: Any) -> list[Sample]:
    """The samples with other routes in their segments; `change` None: without any."""
    special = loaded(tiny_folder(KIND)).policy.special

    def changed(segment: Any) -> Any:
        if segment.routes is None:
            return segment
        return dataclasses.replace(segment, special=special, routes=change and change(segment.routes))

    return [dataclasses.replace(s, segments=tuple(map(changed, s.segments))) for s in samples]


def test_the_gradients_are_those_of_the_same_experts() -> None:
    """Replaying what the router would choose changes no bit, nor does gradient checkpointing, which chooses again."""
    samples = played(Stage(loaded(tiny_folder(KIND))))
    replayed, metrics = updated(samples)
    own, without = updated(with_routes(samples, None))
    assert metrics["router_changed"] == 0 < metrics["router_changed_tokens"]
    assert "router_changed" not in without
    assert all(torch.equal(replayed[name], own[name]) for name in own)
    assert any(".mlp.gate." in name and gradient.abs().max() > 0 for name, gradient in replayed.items())

    others = with_routes(samples, lambda routes: 7 - routes)
    elsewhere, metrics = updated(others)
    assert metrics["router_changed"] > 0.5
    again, repeated = updated(others, gradient_checkpointing=True)
    assert repeated["router_changed"] == metrics["router_changed"]
    for name, gradient in elsewhere.items():
        assert torch.allclose(again[name], gradient, rtol=1e-5, atol=1e-7), name
    assert not torch.allclose(
        elsewhere["model.language_model.layers.0.mlp.experts.down_proj"],
        own["model.language_model.layers.0.mlp.experts.down_proj"],
        rtol=1e-2,
    )


def test_devices_without_grouped_products_multiply_experts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = played(Stage(loaded(tiny_folder(KIND))))
    monkeypatch.setattr(modules, "GROUPED", ())
    stage = Stage(load(tiny_folder(KIND)))
    assert stage.policy.text.config._experts_implementation == "eager"
    assert loaded(tiny_folder(KIND)).policy.text.config._experts_implementation != "eager"
    assert largest_gap(learner_logprobs(stage.policy, stage.vision, samples), engine_logprobs(samples)) < TOLERANCE


def test_an_engine_that_does_not_record_says_nothing() -> None:
    stage = Stage(loaded(tiny_folder(KIND)))
    engine = InProcessEngine(stage.policy, stage.vision, record_routes=False)
    stage.engine, stage.recorder = engine, RecordingEngine(engine)
    assert all(sample.routes is None for sample in played(stage))
