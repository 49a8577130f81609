"""An engine that does not compute with the learner's weights ends the run by name, whatever the data hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.engines.base import Outcome, Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.engines.local import OWN
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.learner.trainer import LearnerError
from npu_vlrl.model.vision import VisionFeatures
from npu_vlrl.rollout.probe import DRAWS, NEW_TOKENS, Probe
from npu_vlrl.training.guard import EngineGuard
from npu_vlrl.types import Generation
from npu_vlrl.workflow.render import Renderer
from tests.integration.test_asynchronous import command
from tests.support.learning import make_learner
from tests.support.models import load, tiny_folder
from tests.support.ranks import finish, fork, log, said
from tests.support.runs import lines
from tests.support.scoring import plain_logprobs

torch.set_num_threads(1)

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3")
LIMIT = 1e-3


class Pair(InProcessEngine):
    """Two engines of one learner: this one, and another one with weights of its own."""

    def __init__(self, own: Any, other: Any) -> None:
        super().__init__(own.policy, VisionFeatures(own.policy, own.processor, 2**26))
        self.other = InProcessEngine(other.policy, VisionFeatures(other.policy, other.processor, 2**26))

    def probe(self, requests: Sequence[Request]) -> dict[str, list[Outcome]]:
        return super().probe(requests) | {"engine 1": self.other.sample_probe(requests)}


class Stage:
    """A learner whose engine samples from its own policy, beside an engine that has a copy."""

    def __init__(self, kind: str) -> None:
        self.loaded, self.copy = (load(tiny_folder(kind)) for _ in range(2))
        self.learner = make_learner(self.loaded, {"max_logprob_gap": LIMIT})
        self.pair = Pair(self.loaded, self.copy)
        group = LearnerGroup(lambda: self.learner)
        self.renderer = Renderer(self.loaded.tokenizer, self.loaded.processor)
        self.probe = Probe(self.loaded, self.renderer, 4096)
        self.guard = EngineGuard(self.pair, group, self.probe)


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param)


# --- what is compared ------------------------------------------------------------------------------------------------


def test_engines_with_the_learners_weights_agree(stage: Stage) -> None:
    metrics = stage.guard(3)
    assert 0 < metrics["probe_gap"] < 2e-5
    assert 2 * DRAWS <= metrics["probe_tokens"] <= 2 * DRAWS * NEW_TOKENS


def test_the_learner_says_what_plain_transformers_say(stage: Stage) -> None:
    """The guard compares with the right thing: the untouched model, its own positions and its own image processor."""
    contexts = stage.probe.contexts(0)
    answers = stage.pair.sample_probe(stage.probe.requests(contexts))
    samples = stage.probe.samples("e", contexts, [one for one in answers if isinstance(one, Generation)])
    plain = plain_logprobs(stage.loaded.folder, samples, 1.0, "right", stage.loaded.policy.n_tokens)
    for sample in samples:
        assert sample.behaviour_logprobs == pytest.approx(plain[sample.id].tolist(), abs=2e-5)


def test_contexts_have_turns_and_pictures_of_which_one_is_new(stage: Stage) -> None:
    (first, text), (second, again) = stage.probe.contexts(0), stage.probe.contexts(1)
    assert text == again and not any(segment.images for segment in text)
    assert [segment.kind.value for segment in first] == ["prompt", "action", "observation"]
    seen = [[image.image.hash for segment in context for image in segment.images] for context in (first, second)]
    if stage.loaded.processor is None:
        assert seen == [[], []]
    else:
        assert [len(hashes) for hashes in seen] == [2, 2] and len({*seen[0], *seen[1]}) == 3
        assert seen[0][1] == seen[1][1]
    assert sum(map(len, first)) < 150


@given(room=st.integers(2, 200))
@settings(deadline=None, max_examples=30)
def test_every_context_fits(stage: Stage, room: int) -> None:
    probe = Probe(stage.loaded, stage.renderer, room)
    for request in probe.requests(probe.contexts(0)):
        assert len(request.token_ids) >= 1 and request.sampling.max_new_tokens >= 1
        assert len(request.token_ids) + request.sampling.max_new_tokens <= room


# --- what is noticed -------------------------------------------------------------------------------------------------


def test_any_damaged_tensor_of_one_engine_is_noticed(stage: Stage) -> None:
    generator = torch.Generator().manual_seed(0)
    for version, (name, tensor) in enumerate(stage.copy.policy.model.named_parameters(), start=1000):
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.add_(torch.randn(tensor.shape, generator=generator))
        stage.pair.other.weights_changed(version)
        with pytest.raises(LearnerError, match=r"the weights engine 1 gives a token .*\.max_logprob_gap=0\.001: "):
            stage.guard(version)
            pytest.fail(f"{name} was not noticed")
        with torch.no_grad():
            tensor.copy_(kept)
    stage.pair.other.weights_changed(0)
    assert stage.guard(0)["probe_gap"] < 2e-5


def test_the_message_says_which_engine_what_gap_and_what_limit() -> None:
    stage = Stage("qwen3")
    with torch.no_grad():
        stage.copy.policy.text.norm.weight.mul_(1.5)
    stage.learner.algorithm = stage.learner.algorithm.model_copy(update={"max_logprob_gap": 1e6})
    gap = stage.guard(5)["probe_gap"]
    assert gap > 0.05
    stage.learner.algorithm = stage.learner.algorithm.model_copy(update={"max_logprob_gap": None})
    with pytest.raises(LearnerError) as error:
        stage.guard(5)
    assert str(error.value).startswith(
        "after the update to version 5 of the weights engine 1 gives a token of the probe a log-probability that "
        f"differs by {gap:.3g} from the learner's, more than algorithm.max_logprob_gap=0.05: "
    )


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_features_of_earlier_weights_are_noticed(kind: str) -> None:
    """Also by an engine that shares every tensor with the learner."""
    stage = Stage(kind)
    vision = stage.pair.vision
    vision.weights_changed = lambda: None  # type: ignore[method-assign]
    stage.guard(0)
    with torch.no_grad():
        for policy in (stage.loaded.policy, stage.copy.policy):
            for tensor in policy.vision.parameters():
                tensor.mul_(1.2)
    for engine in (stage.pair, stage.pair.other):
        engine.weights_changed(1)
    with pytest.raises(LearnerError, match=f"{OWN} gives a token"):
        stage.guard(1)
    vision.forget()
    assert stage.guard(1)["probe_gap"] < 2e-5


def test_weights_that_are_not_finite_are_told_by_name() -> None:
    stage = Stage("qwen3")
    with torch.no_grad():
        stage.copy.policy.text.norm.weight.fill_(torch.nan)
    with pytest.raises(LearnerError, match="engine 1 cannot continue the probe: token 1 of this turn has the log-prob"):
        stage.guard(0)


# --- what it leaves behind -------------------------------------------------------------------------------------------


def test_nothing_counts_and_no_random_state_moves(stage: Stage) -> None:
    def state() -> list[Any]:
        vision = [(one.vision.referenced, one.vision.encoded) for one in (stage.pair, stage.pair.other)]
        engines = [
            (dict(vars(one.counts)), one.weight_version, list(one._caches)) for one in (stage.pair, stage.pair.other)
        ]
        learner = [dict(vars(stage.learner.meter.counts)), stage.learner.vision.referenced, stage.learner.updates]
        return [vision, engines, learner, torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()]

    before = state()
    weights = [tensor.clone() for tensor in stage.loaded.policy.trainable().values()]
    stage.guard(7)
    assert state() == before
    assert all(map(torch.equal, weights, stage.loaded.policy.trainable().values()))
    assert all(tensor.grad is None for tensor in stage.loaded.policy.trainable().values())


# --- whole trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["train.staleness=2"],
        ["sync.through=disk"],
        ["train.learners=all"],
    ],
    ids=["asynchronous", "disk", "learners"],
)
def test_one_damaged_tensor_of_one_engine_ends_the_run_by_name(words: list[str], tmp_path: Path) -> None:
    """The tensor is one of the tower, and no task has a picture: no token that is trained on could show it."""
    training = command(tmp_path, "workflow.turn_tokens=8", *words)[2:]
    codes = finish(fork(2, ["-m", "tests.integration.faulty", "damaged", *training], tmp_path))
    assert codes == [1, 0] or codes == [1, 1], said(tmp_path, 2)
    output = log(tmp_path, 0).read_text()
    assert "npu-vlrl: the run failed: after the update to version 2 of the weights engine 1 (rank 1, process " in output
    assert "from the learner's, more than algorithm.max_logprob_gap=0.001: " in output
    steps = [line for line in lines(tmp_path / "run", "metrics.jsonl") if "grad_norm" in line]
    assert [line["step"] for line in steps] == [0] and steps[0]["probe_gap"] < 1e-4
