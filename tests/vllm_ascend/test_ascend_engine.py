"""The engine on the unmodified vllm-ascend, over the stand-in for CANN, says what the learner and transformers say.

In bfloat16, which is all that the inference attention of an NPU takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from npu_vlrl.config import AlgorithmConfig, OptimConfig
from npu_vlrl.engines.base import Request
from npu_vlrl.engines.vllm.engine import LOGPROBS
from npu_vlrl.learner.gap import LearnerError
from npu_vlrl.learner.group import LearnerGroup
from npu_vlrl.learner.trainer import Learner
from npu_vlrl.rollout.probe import Probe
from npu_vlrl.training.guard import EngineGuard
from npu_vlrl.types import Generation, Sample, SamplingParams, StopReason
from tests import host_cann
from tests.support.models import KINDS, is_vision, plain_model
from tests.support.rounds import generate_all, params, prompt
from tests.support.scoring import engine_logprobs, largest_gap, learner_logprobs, plain_logprobs, with_image
from tests.support.vllm_stage import VllmStage, answered, change, episodes, gap, joined, looks, tell, weights_put_back
from tests.vllm_ascend.stages import FITS, VISIBLE, made_stage

seeing = pytest.mark.parametrize("stage", [kind for kind in KINDS if is_vision(kind)], indirect=True)
reading = pytest.mark.parametrize("stage", ["qwen3"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest) -> Iterator[VllmStage]:
    """One engine for each kind of model; whoever changes its weights takes `restored`, too."""
    made = made_stage(request.param)
    yield made
    made.vllm.close()


@pytest.fixture
def restored(stage: VllmStage) -> Iterator[None]:
    with weights_put_back(stage):
        yield


def test_sampled_tokens_of_several_turns(stage: VllmStage) -> None:
    """Pictures of several sizes, none to four of them in a context; the device computes all of it."""
    with host_cann.counted() as ran:
        samples = episodes(stage, members=2)
    assert {number for s in samples for number in s.weight_versions} == {0}
    assert gap(stage, samples) < FITS
    assert gap(stage, samples, temperature=1.5) > VISIBLE
    exact = plain_model(stage.loaded.folder).bfloat16().float()
    n_tokens = len(stage.loaded.tokenizer)
    plain = plain_logprobs(stage.loaded.folder, samples, 1.0, "left", n_tokens, exact)
    assert largest_gap(engine_logprobs(samples), plain) < FITS
    assert sorted({name for name in ran if name.startswith("fallback::")}) == []
    assert ran["_compute_slot_mapping_kernel"] > 0
    assert (ran["aclnnRotaryPositionEmbedding"] > 0) is is_vision(stage.kind)


def test_an_answer_depends_on_its_seed(stage: VllmStage) -> None:
    contexts = [prompt(stage, *looks(stage), "up?"), prompt(stage, "x")]
    requests = [(context, params(seed)) for seed, context in enumerate(contexts)]
    first, again = generate_all(stage, requests), generate_all(stage, requests)
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in again]
    others = generate_all(stage, [(context, params(99 + seed)) for seed, context in enumerate(contexts)])
    assert [answer.token_ids for answer in others] != [answer.token_ids for answer in first]


@seeing
def test_a_picture_turned_round_is_seen(stage: VllmStage) -> None:
    """What vllm-ascend sampled with one picture does not pass with another one of the same size."""
    sample = next(s for s in episodes(stage, members=2) if s.images)
    rgb = sample.images[0].image.rgb[::-1, ::-1].copy()
    turned = with_image(sample, 0, rgb, stage.policy.special)
    assert gap(stage, [sample]) < FITS
    assert largest_gap(engine_logprobs([sample]), learner_logprobs(stage.policy, stage.vision, [turned])) > VISIBLE


def test_new_weights_are_sampled_with(stage: VllmStage, restored: None) -> None:
    """Each of the three things that an update does is needed: the copy, keys and values dropped, features dropped."""
    context = prompt(stage, *looks(stage), "Which way is up? " * 40)
    length, before = sum(map(len, context)), dataclasses.replace(stage.engine.counts)
    first, second = (generate_all(stage, [(context, params(seed))])[0] for seed in (1, 2))
    computed = stage.engine.counts.tokens_prefilled - before.tokens_prefilled
    assert length < computed <= 2 * length - 128  # the second time a block comes from the cache
    assert gap(stage, [answered(stage, context, second)]) < FITS

    def gap_now() -> float:
        return gap(stage, [answered(stage, context, *generate_all(stage, [(context, params(3))]))])

    def learn(seed: int) -> None:
        change(stage.policy.trainable().values(), seed, size=0.06)
        with torch.no_grad():  # pictures are few tokens of this context: they must look different
            for parameter in stage.policy.vision.parameters() if is_vision(stage.kind) else ():
                parameter.neg_()
        stage.vision.weights_changed()

    learn(seed=1)
    stale = {"weights": gap_now()}
    if is_vision(stage.kind):
        with patch.object(stage.vllm._llm.llm_engine, "reset_encoder_cache"):
            tell(stage, 1)
        stale["features"] = gap_now()
    learn(seed=2)
    with patch.object(stage.engine, "_forget_prompts"):
        tell(stage, 2)
    stale["keys and values"] = gap_now()
    moved = stage.engine.weights_changed(3)
    assert moved["sync/bytes"] == sum(p.numel() * p.element_size() for p in stage.policy.trainable().values())
    (fresh,) = generate_all(stage, [(context, params(3))])
    assert (set(first.weight_versions), set(fresh.weight_versions)) == ({0}, {3})
    assert min(stale.values()) > VISIBLE, stale
    assert gap(stage, [answered(stage, context, fresh)]) < FITS


def test_an_interrupted_turn_goes_on_with_newer_weights(stage: VllmStage, restored: None) -> None:
    """Each token is of the version that it names, after all that came before it."""
    context = prompt(stage, *looks(stage), "up?")
    ids = tuple(token for segment in context for token in segment.token_ids)
    images = tuple(image for segment in context for image in segment.images)
    turns: dict[int, list[Generation]] = {seed: [] for seed in range(4)}
    steps, budget = 3, 8
    for version in range(2):
        made = {seed: tuple(token for part in parts for token in part.token_ids) for seed, parts in turns.items()}
        running = [
            seed for seed, parts in turns.items() if not parts or parts[-1].stop_reason is StopReason.INTERRUPTED
        ]
        asked = iter(range(1000))
        stage.vllm.interrupted = lambda asked=asked, last=version == 1: next(asked) == steps and not last
        requests = [
            Request(seed, ids + made[seed], images, params(100 * version + seed, budget - len(made[seed])))
            for seed in running
        ]
        for seed, answer in zip(running, stage.vllm.sample(requests), strict=True):
            assert isinstance(answer, Generation) and set(answer.weight_versions) == {version}
            turns[seed].append(answer)
            learner = learner_logprobs(stage.policy, stage.vision, [answered(stage, context, joined(turns[seed]))])[
                "s"
            ][-len(answer.token_ids) :]
            assert learner.tolist() == pytest.approx(answer.logprobs, abs=FITS)
        if version == 0:
            change(stage.policy.trainable().values(), seed=5)
            tell(stage, 1)
            stage.vision.weights_changed()
    assert any(len(parts) == 2 for parts in turns.values()), "nobody was interrupted"
    assert all(parts[-1].stop_reason is not StopReason.INTERRUPTED for parts in turns.values())
    # with the weights of the end, the tokens of the beginning are not those of the engine
    longest = max(turns.values(), key=len)
    assert gap(stage, [answered(stage, context, joined(longest))]) > VISIBLE


def test_the_guard_names_an_engine_with_a_damaged_tensor(stage: VllmStage) -> None:
    guard = EngineGuard(stage.vllm, _learner(stage), Probe(stage.loaded, stage.renderer, 512))
    assert guard(1)["probe_gap"] < FITS
    part = "merger" if is_vision(stage.kind) else "down_proj"
    damage(stage, part)
    try:
        with pytest.raises(LearnerError, match="after the update to version 2 of the weights .* gives a token"):
            stage.vllm._forget_prompts()
            stage.vllm._llm.llm_engine.reset_encoder_cache()
            guard(2)
    finally:
        tell(stage, 0)
    assert guard(3)["probe_gap"] < FITS


def damage(stage: VllmStage, part: str) -> None:
    """Turns the signs of the first matrix of that name."""

    def turn(model: torch.nn.Module) -> None:
        tensor = next(p for name, p in model.named_parameters() if part in name and p.dim() == 2)
        with torch.no_grad():
            tensor.neg_()

    stage.vllm._llm.apply_model(turn)


def _learner(stage: VllmStage) -> LearnerGroup:
    config = AlgorithmConfig(max_logprob_gap=VISIBLE)
    return LearnerGroup(lambda: Learner(stage.policy, stage.vision, config, OptimConfig(), 1.0, 1))


@reading
def test_every_row_has_its_own_settings(stage: VllmStage) -> None:
    """In one batch; the log-probabilities are those of what top-k and top-p leave, computed here by hand."""
    context = prompt(stage, "up?")
    greedy, *limited = [
        SamplingParams(6, temperature=0.0),
        *(SamplingParams(6, temperature=0.7, top_k=3, seed=seed) for seed in range(4)),
        *(SamplingParams(6, temperature=0.7, top_p=0.6, seed=seed) for seed in range(4)),
    ]
    first, *answers = generate_all(stage, [(context, one) for one in (greedy, *limited)])
    (best,) = generate_all(stage, [(context, SamplingParams(6, temperature=0.7, top_p=1e-6, seed=1))])
    assert best.token_ids == first.token_ids
    unlimited = 0
    for settings, answer in zip(limited, answers, strict=True):
        scores = _scores(stage, answered(stage, context, answer), len(answer.token_ids)) / settings.temperature
        for row, token, said in zip(scores, answer.token_ids, answer.logprobs, strict=True):
            left = _kept(row, settings)
            near = row >= row[left].min() - 0.1  # which rounding may keep: equal ones are all kept
            assert near[token]
            least, most = float(row[token] - row[near].logsumexp(0)), float(row[token] - row[left].logsumexp(0))
            assert least - FITS < said < most + FITS
            unlimited += float(row.log_softmax(0)[token]) < least - FITS
    assert unlimited > 5  # of 48: without limits these would say less


def _scores(stage: VllmStage, sample: Sample, number: int) -> torch.Tensor:
    """Of plain transformers for the last `number` tokens, [number, V]."""
    exact = plain_model(stage.loaded.folder).bfloat16().float()
    with torch.no_grad():
        scores = exact(torch.tensor([sample.token_ids])).logits[0, -number - 1 : -1]
    return scores.masked_fill(stage.policy.forbidden_V.cpu()[: scores.shape[-1]], -torch.inf)


def _kept(scores: torch.Tensor, settings: SamplingParams) -> torch.Tensor:
    """The tokens that top-k or top-p leaves."""
    probabilities, tokens = scores.softmax(0).sort(descending=True)
    if settings.top_k:
        return tokens[: settings.top_k]
    return tokens[probabilities.cumsum(0) - probabilities < settings.top_p]


@reading
def test_logprobs_are_those_of_what_was_drawn_from(stage: VllmStage) -> None:
    """vllm-ascend's sampler does not hear of the mode, so each worker is told."""
    rpc = stage.vllm._llm.collective_rpc
    rpc("set_logprobs_mode", args=("raw_logprobs",))
    raw = gap(stage, episodes(stage, 0.7), 0.7)
    rpc("set_logprobs_mode", args=(LOGPROBS,))
    assert gap(stage, episodes(stage, 0.7), 0.7) < FITS and raw > VISIBLE


@reading
def test_placeholders_and_padding_are_never_sampled(stage: VllmStage, restored: None) -> None:
    head = stage.policy.head_weight
    never = sorted(set(stage.policy.forbidden_V.nonzero()[:, 0].tolist()))
    with torch.no_grad():
        head[never] = 50 * head[never].sign()
    tell(stage, 1)
    requests = [(prompt(stage, f"{word}?"), params(seed)) for seed, word in enumerate("abcd")]
    assert set(never).isdisjoint(token for answer in generate_all(stage, requests) for token in answer.token_ids)
    with patch.object(stage.engine, "_forbidden", {}):
        drawn = generate_all(stage, requests)
    assert not set(never).isdisjoint(token for answer in drawn for token in answer.token_ids)
