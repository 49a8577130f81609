"""The engine on a CUDA device: recorded decoding, and the learner's forward pass over what it sampled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch

from npu_vlrl import kernels
from npu_vlrl.config import ModelConfig
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.hardware.cuda import CudaPlatform
from npu_vlrl.kernels.graph_capture import can_capture_experts
from npu_vlrl.kernels.tree import Tree
from npu_vlrl.model.load import load_model
from npu_vlrl.model.positions import rotary_positions
from npu_vlrl.model.routing import Routing
from npu_vlrl.types import Generation, Sample, SamplingParams, Segment
from tests.support.episodes import Stage
from tests.support.models import KINDS, is_vision, tiny_folder
from tests.support.rounds import LOOKS, continued, generate_all, params, prompt, run

MIXTURE = "qwen3_vl_moe"
PRECISION = {"float32": 1e-4, "bfloat16": 0.15}
"""Nats between two computations of a log-probability; those of the tiny models are as far apart as 8 bits make them."""


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    CudaPlatform().set_device(0)
    kernels.use("cuda")
    yield
    kernels.use("reference")
    torch.cuda.empty_cache()


def staged(kind: str, dtype: str = "float32", record: bool = True) -> Stage:
    folder = tiny_folder(kind)
    stage = Stage(load_model(ModelConfig(path=str(folder), dtype=dtype), folder, 0, torch.device("cuda", 0)))
    if record:
        stage.engine = InProcessEngine(stage.policy, stage.vision, new_capture=CudaPlatform().graph_capture)
    return stage


def contexts(stage: Stage, kind: str) -> list[list[Segment]]:
    return [prompt(stage, *(LOOKS[:n] if is_vision(kind) else ()), "up?") for n in (0, 1, 2, 1, 0)]


SETTINGS = [
    SamplingParams(30, 1.0, seed=1),
    SamplingParams(2, 0.7, seed=2),
    SamplingParams(9, 0.0),
    SamplingParams(40, 1.0, top_k=5, seed=4),
    SamplingParams(17, 1.3, top_p=0.8, seed=5),
]


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_give_what_launched_ones_give(kind: str) -> None:
    answers: list[list[Generation]] = []
    for record in (True, False):
        stage = staged(kind, record=record)
        answers.append(generate_all(stage, list(zip(contexts(stage, kind), SETTINGS, strict=True))))
    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.stop_reason is theirs.stop_reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_on_the_gpu_as_on_the_cpu() -> None:
    """The same weights and seeds in float32: the same tokens, by other kernels."""
    stage, kind = staged("qwen2_5_vl"), "qwen2_5_vl"
    found = generate_all(stage, list(zip(contexts(stage, kind), SETTINGS, strict=True)))
    kernels.use("reference")
    folder = tiny_folder(kind)
    host = Stage(load_model(ModelConfig(path=str(folder)), folder, 0, torch.device("cpu")))
    wanted = generate_all(host, list(zip(contexts(host, kind), SETTINGS, strict=True)))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def test_experts_are_captured_where_their_products_do_not_wait() -> None:
    """In bfloat16 they are one product; in float32 torch takes their sizes to the host."""
    layers = {dtype: staged(MIXTURE, dtype, record=False).policy for dtype in PRECISION}
    found = {
        dtype: can_capture_experts(CudaPlatform(), policy.text.layers[0].mlp, policy.head_weight[None, :2])
        for dtype, policy in layers.items()
    }
    assert found == {"float32": False, "bfloat16": True}


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("kind", [*KINDS, MIXTURE])
def test_what_was_sampled_has_the_learners_probability(kind: str, dtype: str) -> None:
    """Two turns; the second continues from kept keys. All is judged in one packed pass, as the learner does, by the
    experts that sampled.
    """
    stage = staged(kind, dtype, record=kind != MIXTURE or dtype == "bfloat16")
    sessions = [stage.engine.session() for _ in range(5)]
    now, settings = contexts(stage, kind), [params(seed, 25) for seed in range(5)]
    played: list[list[Segment]] = []
    answers: list[list[Generation]] = []
    for _ in range(2):
        turn = run(*(s.generate(c, one) for s, c, one in zip(sessions, now, settings, strict=True)))
        answers.append(turn)
        now = [continued(stage, c, a, "No.") for c, a in zip(now, turn, strict=True)]
        played = now
    gaps = []
    sequences = [[token for segment in context for token in segment.token_ids] for context in played]
    images = [[image for segment in context for image in segment.images] for context in played]
    special = stage.policy.special
    positions = [
        torch.from_numpy(rotary_positions(ids, own, special.image, stage.policy.merge_size))
        for ids, own in zip(sequences, images, strict=True)
    ]
    bounds = [0, *accumulate(map(len, sequences))]
    with torch.no_grad():
        hidden = stage.policy.hidden_packed(
            torch.tensor(sum(sequences, []), device="cuda"),
            torch.cat(positions, 1).cuda(),
            Tree.of_sequences(bounds),
            stage.vision.fixed([image for own in images for image in own]),
            routing(played) if kind == MIXTURE else None,
        )
    for row, context in enumerate(played):
        at = bounds[row]
        for segment in context:
            if segment.logprobs:
                rows = slice(at - 1, at - 1 + len(segment))
                targets = torch.tensor(segment.token_ids, device="cuda")
                found, _ = kernels.op("logprob_entropy")(
                    hidden[rows], stage.policy.head_weight, targets, 1.0, stage.policy.forbidden_V
                )
                gaps += (found.float().cpu() - torch.tensor(segment.logprobs)).abs().tolist()
            at += len(segment)
    assert len(gaps) == sum(len(a.token_ids) for turn in answers for a in turn) > 20
    assert max(gaps) < PRECISION[dtype] and sum(gaps) / len(gaps) < PRECISION[dtype] / 5


def routing(played: list[list[Segment]]) -> Routing:
    """Replays what the engine said of packed contexts; of what follows the last action nothing is known."""
    parts = []
    for context in played:
        sample = Sample("a", "a", tuple(context), (1,), 0.0, 0.0, "a")
        assert sample.routes is not None and (sample.routes[: -len(context[-1]) - 1] >= 0).all()
        parts.append(torch.from_numpy(sample.routes))
    return Routing(torch.cat(parts).cuda())


def test_larger_batches_after_smaller_ones_and_back() -> None:
    """A batch that has grown has other addresses: everything is recorded anew, and what was before is given back."""
    stage = staged("qwen3", "bfloat16")
    context = prompt(stage, "up?")
    for rows, tokens in ((2, 10), (9, 40), (3, 12), (30, 200), (1, 5)):
        answers = generate_all(stage, [(context, params(seed, tokens)) for seed in range(rows)])
        assert all(isinstance(answer, Generation) for answer in answers)
    assert len({answer.token_ids for answer in generate_all(stage, [(context, params(s, 40)) for s in range(8)])}) > 1


def test_weights_that_change_in_place_are_seen_by_recorded_steps() -> None:
    stage = staged("qwen3")
    context = prompt(stage, "up?")
    generate_all(stage, [(context, params(0, 20))])
    with torch.no_grad():
        for parameter in stage.policy.trainable().values():
            parameter.mul_(1.05)
    stage.engine.weights_changed(1)
    (found,) = generate_all(stage, [(context, params(0, 20))])
    stage.engine = InProcessEngine(stage.policy, stage.vision)
    (wanted,) = generate_all(stage, [(context, params(0, 20))])
    assert found.token_ids == wanted.token_ids
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
