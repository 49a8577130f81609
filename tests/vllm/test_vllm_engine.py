"""The engine on the real vLLM says what the in-process engine, the learner and plain transformers say."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from npu_vlrl.engines.base import EngineError, Request
from npu_vlrl.engines.vllm.engine import CPU_TURNS, LOGPROBS
from npu_vlrl.types import Generation, SamplingParams, Segment, SegmentKind, StopReason
from npu_vlrl.workflow.export import export
from tests.support.episodes import Reply, an_image, task
from tests.support.models import KINDS, is_vision, load, plain_model, tiny_folder
from tests.support.rounds import continued, generate_all, params, prompt, run
from tests.support.scoring import (
    TOLERANCE,
    engine_logprobs,
    largest_gap,
    learner_logprobs,
    plain_logprobs,
    with_image,
)
from tests.support.vllm_stage import (
    CONTEXT,
    HIDDEN,
    VllmStage,
    answered,
    change,
    episodes,
    gap,
    joined,
    looks,
    tell,
    weights_put_back,
)

VISIBLE = 1e-3

seeing = pytest.mark.parametrize("stage", [kind for kind in KINDS if is_vision(kind)], indirect=True)
"""For tests of models that see."""


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest) -> Iterator[VllmStage]:
    """One engine for each kind of model; whoever changes its weights takes `restored`, too."""
    made = VllmStage(request.param, load(tiny_folder(request.param, HIDDEN)))
    yield made
    made.vllm.close()


@pytest.fixture
def restored(stage: VllmStage) -> Iterator[None]:
    with weights_put_back(stage):
        yield


def test_greedy_tokens_are_those_of_the_inprocess_engine(stage: VllmStage) -> None:
    words = ("up?", "x", "Which way?", "left", "No. Try again.")
    contexts = [prompt(stage, *looks(stage)[number % 3 :], word) for number, word in enumerate(words)]
    requests = [(context, params(0, 12, temperature=0.0)) for context in contexts]
    found = generate_all(stage, requests)
    with patch.object(stage, "engine", stage.inprocess):
        ours = generate_all(stage, requests)
    for mine, theirs in zip(ours, found, strict=True):
        assert theirs.token_ids == mine.token_ids
        assert theirs.logprobs == pytest.approx(mine.logprobs, abs=TOLERANCE)
        assert theirs.stop_reason is mine.stop_reason
    assert sum(len(answer.token_ids) for answer in found) > 5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_of_several_turns(stage: VllmStage, temperature: float) -> None:
    samples = episodes(stage, temperature)
    assert gap(stage, samples, temperature) < TOLERANCE
    assert gap(stage, samples, 1.1 * temperature) > VISIBLE
    n_tokens = len(stage.loaded.tokenizer)
    plain = plain_logprobs(stage.loaded.folder, samples, temperature, "left", n_tokens)
    assert largest_gap(engine_logprobs(samples), plain) < TOLERANCE
    assert len({sample.token_ids[-1] for sample in samples}) > 1
    assert {version for sample in samples for version in sample.weight_versions} == {0}


def test_logprobs_are_those_of_what_was_drawn_from(stage: VllmStage) -> None:
    """With vLLM's default they would be those before temperature and bias. The mode reaches the runner's samplers."""
    rpc = stage.vllm._llm.collective_rpc
    rpc("set_logprobs_mode", args=("raw_logprobs",))
    assert gap(stage, episodes(stage, 0.7), 0.7) > VISIBLE
    rpc("set_logprobs_mode", args=(LOGPROBS,))
    assert gap(stage, episodes(stage, 0.7), 0.7) < TOLERANCE


@seeing
def test_a_image_that_changed_is_seen(stage: VllmStage) -> None:
    """What vLLM sampled with one image does not pass with another one of the same size."""
    samples = episodes(stage)[:1]
    rgb = samples[0].images[0].image.rgb.copy()
    rgb[8:22, 4:18] = 255 - rgb[8:22, 4:18]
    other = with_image(samples[0], 0, rgb, stage.policy.special)
    assert gap(stage, samples) < TOLERANCE
    learner = learner_logprobs(stage.policy, stage.vision, [other])
    assert largest_gap(engine_logprobs(samples), learner) > VISIBLE / 10


def test_new_weights_in_the_middle_of_an_episode(stage: VllmStage, restored: None) -> None:
    """The turn after the update is the new model's, and says so; the images were seen before it."""
    context = prompt(stage, *looks(stage), "up?")
    session = stage.engine.session()
    (first,) = run(session.generate(context, params(1)))
    longer = continued(stage, context, first, "Try again.")
    change(stage.policy.trainable().values(), seed=1)
    (stale,) = run(session.generate(longer, params(2)))
    moved = stage.engine.weights_changed(7)
    (second,) = run(session.generate(longer, params(2)))
    session.close()
    assert moved["sync/bytes"] == 4 * sum(p.numel() for p in stage.policy.trainable().values())
    assert (set(first.weight_versions), set(second.weight_versions)) == ({0}, {7})
    stage.vision.weights_changed()
    for answer, fits in ((stale, False), (second, True)):
        sample = answered(stage, longer, answer)
        assert (gap(stage, [sample]) < TOLERANCE) is fits
        assert fits or gap(stage, [sample]) > VISIBLE


def test_an_interrupted_turn_goes_on_with_newer_weights(stage: VllmStage, restored: None) -> None:
    """Twice interrupted: each token is of the version that it names, after all that came before it."""
    context = prompt(stage, *looks(stage), "up?")
    ids = tuple(token for segment in context for token in segment.token_ids)
    images = tuple(image for segment in context for image in segment.images)
    turns: dict[int, list[Generation]] = {seed: [] for seed in range(6)}
    steps, budget = 3, 12
    for version in range(3):
        running = {
            seed: tuple(token for part in parts for token in part.token_ids)
            for seed, parts in turns.items()
            if not parts or parts[-1].stop_reason is StopReason.INTERRUPTED
        }
        requests = [
            Request(seed, ids + made, images, params(100 * version + seed, budget - len(made)))
            for seed, made in running.items()
        ]
        asked = iter(range(1000))
        stage.vllm.interrupted = lambda asked=asked, last=version == 2: next(asked) == steps and not last
        for seed, answer in zip(running, stage.vllm.sample(requests), strict=True):
            assert isinstance(answer, Generation)
            assert set(answer.weight_versions) == {version} and len(answer.token_ids) <= steps or version == 2
            turns[seed].append(answer)
            whole = [value for part in turns[seed] for value in part.token_ids]
            (sample,) = [answered(stage, context, joined(turns[seed]))]
            learner = learner_logprobs(stage.policy, stage.vision, [sample])["s"][len(whole) - len(answer.token_ids) :]
            assert learner.tolist() == pytest.approx(answer.logprobs, abs=TOLERANCE)
        if version < 2:
            change(stage.policy.trainable().values(), seed=version + 5)
            tell(stage, version + 1)
            stage.vision.weights_changed()
    assert any(len(parts) == 3 for parts in turns.values()), "nobody was interrupted twice"
    assert all(parts[-1].stop_reason is not StopReason.INTERRUPTED for parts in turns.values())
    assert not stage.vllm._llm.llm_engine.has_unfinished_requests()
    # with the weights of the end, the tokens of the beginning are not those of the engine
    longest = max(turns.values(), key=len)
    assert gap(stage, [answered(stage, context, joined(longest))]) > VISIBLE


def test_an_interruption_before_the_first_step(stage: VllmStage) -> None:
    context = prompt(stage, "up?")
    request = Request(0, tuple(token for segment in context for token in segment.token_ids), (), params(0))
    with patch.object(stage.vllm, "interrupted", lambda: True):
        assert stage.vllm.sample([request]) == [Generation((), (), (), StopReason.INTERRUPTED)]
    (after,) = stage.vllm.sample([request])
    assert isinstance(after, Generation) and after.token_ids


@seeing
def test_a_new_tower_is_seen_in_images_of_before(stage: VllmStage, restored: None) -> None:
    llm = stage.vllm._llm.llm_engine
    assert gap(stage, episodes(stage)) < TOLERANCE
    change(stage.policy.vision.parameters(), seed=2)
    with patch.object(llm, "reset_encoder_cache"):  # the check notices features of the old tower
        tell(stage, 1)
    stage.vision.weights_changed()
    assert gap(stage, episodes(stage)) > VISIBLE
    tell(stage, 2)
    samples = episodes(stage)
    assert gap(stage, samples) < TOLERANCE
    assert {version for sample in samples for version in sample.weight_versions} == {2}


def test_keys_and_values_of_old_weights_are_dropped(stage: VllmStage, restored: None) -> None:
    """A prompt longer than a block of vLLM's cache, asked for again after an update."""
    context = prompt(stage, *looks(stage), "Which way is up? " * 40)
    length, before = sum(map(len, context)), dataclasses.replace(stage.engine.counts)
    generate_all(stage, [(context, params(1))])
    generate_all(stage, [(context, params(2))])
    computed = stage.engine.counts.tokens_prefilled - before.tokens_prefilled
    assert stage.engine.counts.tokens_requested - before.tokens_requested == 2 * length
    assert length < computed <= 2 * length - 128  # the second time from the cache
    change(stage.policy.text.parameters(), seed=3)
    with patch.object(stage.engine, "_forget_prompts"):
        tell(stage, 1)
    stage.vision.weights_changed()
    (stale,) = generate_all(stage, [(context, params(3))])
    assert gap(stage, [answered(stage, context, stale)]) > VISIBLE
    tell(stage, 2)
    (fresh,) = generate_all(stage, [(context, params(3))])
    assert gap(stage, [answered(stage, context, fresh)]) < TOLERANCE


def test_an_answer_depends_on_its_seed_alone(stage: VllmStage) -> None:
    contexts = [prompt(stage, *looks(stage), "up?"), prompt(stage, "x"), prompt(stage, "y?")]
    requests = [(context, params(seed, 8)) for seed, context in enumerate(contexts)]
    together = generate_all(stage, requests)
    for answer, request in zip(together, requests, strict=True):
        (alone,) = generate_all(stage, [request])
        assert alone.token_ids == answer.token_ids
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=TOLERANCE)
    (other,) = generate_all(stage, [(contexts[0], params(99, 8))])
    assert other.token_ids != together[0].token_ids


def test_a_round_larger_than_what_is_computed_at_once(stage: VllmStage) -> None:
    """Twice as many long prompts as are decoded together, each with words and images of its own."""
    shown = [[an_image(112, 112, number)] if looks(stage) else [] for number in range(2 * CPU_TURNS)]
    contexts = [prompt(stage, f"{n} Which way? " * 20, *images) for n, images in enumerate(shown)]
    assert sum(len(segment) for context in contexts for segment in context) > 8_192
    answers = generate_all(stage, [(context, params(n, 4)) for n, context in enumerate(contexts)])
    samples = [
        dataclasses.replace(answered(stage, context, answer), id=str(n))
        for n, (context, answer) in enumerate(zip(contexts, answers, strict=True))
    ]
    assert gap(stage, samples) < TOLERANCE


def test_every_row_has_its_own_settings(stage: VllmStage) -> None:
    context = prompt(stage, "up?")
    settings = [
        SamplingParams(6, temperature=0.0),
        SamplingParams(6, temperature=1.0, top_k=1, seed=1),
        SamplingParams(6, temperature=1.0, top_p=1e-6, seed=2),
    ]
    greedy, top_k, top_p = generate_all(stage, [(context, one) for one in settings])
    assert greedy.token_ids == top_k.token_ids == top_p.token_ids
    assert set(top_k.logprobs) == set(top_p.logprobs) == {0.0} and max(greedy.logprobs) < 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_and_padding_are_never_sampled(stage: VllmStage, restored: None, temperature: float) -> None:
    """Their rows of the head are made enormous; with nothing forbidden, the same requests draw them."""
    head = stage.policy.head_weight
    never = set(stage.policy.forbidden_V.nonzero()[:, 0].tolist())
    assert len(never) > 2
    with torch.no_grad():
        head[sorted(never)] = 50 * head[sorted(never)].sign()
    tell(stage, 1)
    requests = [(prompt(stage, f"{word}?"), params(seed, 6, temperature)) for seed, word in enumerate("abcd")]
    assert never.isdisjoint(token for answer in generate_all(stage, requests) for token in answer.token_ids)
    with patch.object(stage.engine, "_forbidden", {}):
        drawn = generate_all(stage, requests)
    assert not never.isdisjoint(token for answer in drawn for token in answer.token_ids)


def test_why_a_turn_ended(stage: VllmStage) -> None:
    short, full = prompt(stage, "up?"), [Segment(SegmentKind.PROMPT, (50,) * (CONTEXT - 3), stage.policy.special)]
    seen = set()
    for context, budget, cut, length in (
        (short, 3, StopReason.TURN_BUDGET, 3),
        (short, 60, StopReason.TURN_BUDGET, 60),
        (full, 3, StopReason.TURN_BUDGET, 3),
        (full, 9, StopReason.CONTEXT_FULL, 3),
    ):
        for answer in generate_all(stage, [(context, params(seed, budget)) for seed in range(8)]):
            ended = answer.token_ids[-1] in stage.policy.special.end_of_turn
            assert answer.stop_reason is (StopReason.END_OF_TURN if ended else cut)
            assert ended or len(answer.token_ids) == length
            seen.add(answer.stop_reason)
    assert seen == set(StopReason) - {StopReason.INTERRUPTED}


def test_a_request_that_cannot_be_played_fails_alone(stage: VllmStage) -> None:
    full = [Segment(SegmentKind.PROMPT, (50,) * CONTEXT, stage.policy.special)]
    short = prompt(stage, "up?")
    requests = [(full, params(0)), (short, params(1)), (short, params(2, temperature=0.001)), (short, params(3, 4, 5))]
    too_long, fine, too_cold, too_hot = generate_all(stage, requests)
    assert isinstance(too_long, ValueError) and "raise workflow.context_tokens" in str(too_long)
    assert isinstance(too_cold, ValueError) and str(too_cold).endswith("greedily at 0, but not at 0.001")
    assert isinstance(too_hot, ValueError) and str(too_hot).endswith("greedily at 0, but not at 5")
    (alone,) = generate_all(stage, [(short, params(1))])
    assert fine.token_ids == alone.token_ids


@seeing
def test_another_image_processor_is_noticed(stage: VllmStage) -> None:
    processor = stage.loaded.processor
    assert processor is not None
    context = prompt(stage, an_image(60, 60, 1), "up?")
    larger = dataclasses.replace(processor, min_pixels=200 * 200)
    with patch.object(stage.engine, "processor", larger):
        (answer,) = generate_all(stage, [(context, params(0))])
    assert isinstance(answer, EngineError) and "its image processor and ours differ" in str(answer)


@seeing
def test_a_image_that_was_resized_before(stage: VllmStage) -> None:
    """vLLM would round other pixels: the gap to the learner shows that it has nothing to resize."""
    stage.recorder.asked.clear()
    tasks = [task("t", [an_image(191, 77, 5), an_image(33, 130, 6), "?"], Reply("see", (an_image(41, 43, 7),)))]
    samples = export(stage.play(tasks), "concat", "best", 1.0, "test")
    assert gap(stage, samples) < TOLERANCE


def test_a_frozen_tower_and_a_head_of_its_own(tmp_path: Path) -> None:
    """Features of images stay, and the head is not the embedding."""
    folder = shutil.copytree(tiny_folder("qwen2_5_vl", HIDDEN), tmp_path / "untied")
    model = plain_model(folder)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.1)
    model.save_pretrained(folder)
    stage = VllmStage("qwen2_5_vl", load(folder, freeze_vision=True))
    try:
        assert stage.policy.head_weight is not stage.policy.base.get_input_embeddings().weight
        assert gap(stage, episodes(stage)) < TOLERANCE
        change(stage.policy.trainable().values(), seed=4)
        with patch.object(stage.vllm._llm.llm_engine, "reset_encoder_cache") as reset:
            tell(stage, 1)
        reset.assert_not_called()
        assert gap(stage, episodes(stage)) < TOLERANCE
    finally:
        stage.vllm.close()
