"""What the in-process engine computes and shares, and what it draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.types import SamplingParams, Segment, SegmentKind, StopReason
from tests.support.episodes import Reply, Stage, an_image, task
from tests.support.models import KINDS, VISION_KINDS, is_vision, load, loaded, plain, plain_patches, tiny_folder
from tests.support.rounds import LOOKS, continued, generate_all, params, prompt, run, watched

# What is shared


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_the_prompt_of_a_group_is_computed_once(kind: str) -> None:
    stage = Stage(loaded(tiny_folder(kind)))
    context = prompt(stage, *LOOKS, "up?")
    length = sum(map(len, context))
    assert stage.policy.vision is not None
    with watched(stage.policy.text.embed_tokens) as embedded, watched(stage.policy.vision.roots[0]) as towers:
        answers = generate_all(stage, [(context, params(seed)) for seed in range(4)])
    assert embedded[0] == (length,)
    assert sum(shape[0] for shape in embedded[1:]) == sum(len(a.token_ids) - 1 for a in answers)
    patches = sum(image.grid[1] * image.grid[2] for segment in context for image in segment.images)
    assert [shape[0] for shape in towers] == [patches]
    assert (stage.vision.encoded, stage.vision.referenced) == (2, 2)
    counts = stage.engine.counts
    assert (counts.tokens_requested, counts.tokens_prefilled) == (4 * length, length)
    assert (counts.turns, counts.tokens_decoded) == (4, sum(len(a.token_ids) for a in answers))
    assert len({a.token_ids for a in answers}) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_continues_from_the_turn_before(kind: str) -> None:
    """Only the last sampled token, which never was an input, and what was added are computed."""
    stage = Stage(loaded(tiny_folder(kind)))
    images = LOOKS if is_vision(kind) else []
    context = prompt(stage, *images, "up?")
    session = stage.engine.session()
    (first,) = run(session.generate(context, params(1)))
    longer = continued(stage, context, first, "Try again.")
    before = stage.engine.counts.tokens_prefilled
    encoded = stage.vision.encoded
    with watched(stage.policy.text.embed_tokens) as embedded:
        (second,) = run(session.generate(longer, params(2)))
    session.close()
    assert embedded[0] == (1 + len(longer[-1]),)
    assert stage.engine.counts.tokens_prefilled - before == 1 + len(longer[-1])
    assert stage.vision.encoded == encoded
    (alone,) = generate_all(Stage(loaded(tiny_folder(kind))), [(longer, params(2))])
    assert alone.token_ids == second.token_ids
    assert alone.logprobs == pytest.approx(second.logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_a_new_image_in_a_later_turn_is_the_only_one_encoded(kind: str) -> None:
    stage = Stage(loaded(tiny_folder(kind)))
    tasks = [task("t", [LOOKS[0], "up?"], Reply("see", (LOOKS[1], LOOKS[0])), Reply("no"))]
    assert stage.policy.vision is not None
    with watched(stage.policy.vision.roots[0]) as towers:
        stage.play(tasks, members=3)
    assert len(towers) == 2 and stage.vision.encoded == 2
    assert stage.engine.counts.tokens_prefilled < 0.6 * stage.engine.counts.tokens_requested


def test_equal_tokens_with_other_images_are_not_shared() -> None:
    stage = Stage(loaded(tiny_folder("qwen2_5_vl")))
    contexts = [prompt(stage, an_image(60, 60, seed), "up?") for seed in (1, 2)]
    assert contexts[0][0].token_ids == contexts[1][0].token_ids
    with watched(stage.policy.text.embed_tokens) as embedded:
        both = generate_all(stage, [(context, params(7)) for context in contexts])
    assert embedded[0] == (2 * len(contexts[0][0]),)
    assert both[0].logprobs != pytest.approx(both[1].logprobs, abs=1e-4)


def test_a_session_whose_earlier_image_changed_starts_afresh() -> None:
    stage = Stage(loaded(tiny_folder("qwen2_5_vl")))
    shown, other = (prompt(stage, an_image(60, 60, seed), "up?") for seed in (1, 2))
    session = stage.engine.session()
    (first,) = run(session.generate(shown, params(1)))
    longer = continued(stage, other, first, "Again.")
    (second,) = run(session.generate(longer, params(2)))
    session.close()
    (alone,) = generate_all(stage, [(longer, params(2))])
    assert second.token_ids == alone.token_ids
    assert second.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_session_whose_history_was_rewritten_starts_afresh() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    session = stage.engine.session()
    run(session.generate(prompt(stage, "up?"), params(1)))
    for words in ("down?", "u"):  # another prompt of the same length, and a shorter one
        context = prompt(stage, words)
        (answer,) = run(session.generate(context, params(2)))
        (alone,) = generate_all(Stage(loaded(tiny_folder("qwen3"))), [(context, params(2))])
        assert answer.token_ids == alone.token_ids
    session.close()


def test_a_context_that_the_cache_holds_to_its_end_is_computed_afresh() -> None:
    """Nothing would be left to compute, and so no hidden state to predict the next token from."""
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    session = stage.engine.session()
    (first,) = run(session.generate(context, params(3)))
    assert len(first.token_ids) > 1
    held = Segment(SegmentKind.OBSERVATION, first.token_ids[:-1], stage.policy.special)
    (second,) = run(session.generate([*context, held], params(4)))
    session.close()
    (alone,) = generate_all(stage, [([*context, held], params(4))])
    assert second.token_ids == alone.token_ids
    assert second.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_finished_rows_leave_the_batch() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    with watched(stage.policy.text.embed_tokens) as embedded:
        answers = generate_all(
            stage, [(context, params(seed, tokens)) for seed, tokens in enumerate([2, 9, 5, 9, 1, 7])]
        )
    lengths = [len(answer.token_ids) for answer in answers]
    assert len(set(lengths)) > 2
    expected = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert [shape[0] for shape in embedded[1:]] == expected


# What is drawn


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_depend_on_the_batch(kind: str) -> None:
    stage = Stage(loaded(tiny_folder(kind)))
    images: list[Any] = LOOKS if is_vision(kind) else []
    contexts = [
        prompt(stage, "up?"),
        prompt(stage, *images, "Which way is the top?"),
        prompt(stage, "x", *images[:1]),
    ]
    requests = [(context, params(seed)) for seed, context in enumerate(contexts)]
    alone = [generate_all(stage, [request])[0] for request in requests]

    @settings(max_examples=15)
    @given(st.permutations(range(3)), st.integers(1, 3))
    def check(order: list[int], size: int) -> None:
        together = generate_all(stage, [requests[i] for i in order[:size]])
        for index, answer in zip(order[:size], together, strict=True):
            assert answer.token_ids == alone[index].token_ids
            assert answer.logprobs == pytest.approx(alone[index].logprobs, abs=1e-5)
            assert answer.stop_reason is alone[index].stop_reason

    check()
    other_seed = generate_all(stage, [(contexts[0], params(99))])[0]
    assert other_seed.token_ids != alone[0].token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str) -> None:
    """transformers' own loop, on the same model with the same images, with the same ids suppressed."""
    folder = tiny_folder(kind)
    stage, model = Stage(loaded(folder)), plain(folder)
    images: list[Any] = LOOKS if is_vision(kind) else []
    forbidden = sorted(stage.policy.special.placeholders) + list(
        range(stage.policy.n_tokens, len(stage.policy.head_weight))
    )
    for number, text in enumerate(("up?", "Which way is the top?", "x")):
        context = prompt(stage, *images[number % 2 :], text)
        (answer,) = generate_all(stage, [(context, params(0, 12, temperature=0.0))])
        ids = torch.tensor([context[0].token_ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            inputs |= plain_patches(folder, [image.rgb for image in images[number % 2 :]])
            inputs["mm_token_type_ids"] = torch.eq(ids, stage.policy.special.image or -1).int()
        made = model.generate(
            **inputs,
            max_new_tokens=12,
            do_sample=False,
            suppress_tokens=forbidden,
            eos_token_id=list(stage.policy.special.end_of_turn),
        )
        assert list(answer.token_ids) == made[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_each_token_inverts_the_distribution_at_its_own_random_number(temperature: float) -> None:
    """The whole chain in float64 from the logits of plain transformers and the random stream of the seed."""
    folder = tiny_folder("qwen3")
    stage, model = Stage(loaded(folder)), plain(folder)
    compared = 0
    for seed in range(8):
        context = prompt(stage, "up?")
        (answer,) = generate_all(stage, [(context, params(seed, 8, temperature))])
        numbers = torch.rand(8, generator=torch.Generator().manual_seed(seed)).double()
        ids = torch.tensor([[*context[0].token_ids, *answer.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(context[0]) - 1 : -1, : stage.policy.n_tokens].double()
        cumulative = (logits / temperature).softmax(-1).cumsum(-1)
        for row, number, token in zip(cumulative, numbers, answer.token_ids, strict=False):
            if (row - number).abs().min() > 1e-5:  # else rounding decides between two neighbours
                assert int((row <= number).sum()) == token
                compared += 1
    assert compared > 20


def test_every_row_has_its_own_settings() -> None:
    stage = Stage(loaded(tiny_folder("qwen3_vl")))
    context = prompt(stage, LOOKS[0], "up?")
    settings = [
        SamplingParams(6, temperature=0.0),
        SamplingParams(6, temperature=1.0, top_k=1, seed=1),
        SamplingParams(6, temperature=1.0, top_p=1e-6, seed=2),
        SamplingParams(6, temperature=5.0, seed=3),
        SamplingParams(6, temperature=0.5, seed=3),
    ]
    greedy, top_k, top_p, hot, cold = together = generate_all(stage, [(context, one) for one in settings])
    assert greedy.token_ids == top_k.token_ids == top_p.token_ids
    assert set(top_k.logprobs) == set(top_p.logprobs) == {0.0} and max(greedy.logprobs) < 0
    assert hot.token_ids != cold.token_ids and sum(hot.logprobs) < sum(cold.logprobs)
    for answer, one in zip(together, settings, strict=True):
        (alone,) = generate_all(stage, [(context, one)])
        assert alone.token_ids == answer.token_ids
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-5)


def test_greedy_is_scored_at_temperature_one() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    (answer,) = generate_all(stage, [(context, params(0, 1, temperature=0.0))])
    with torch.no_grad():
        logits = plain(tiny_folder("qwen3"))(input_ids=torch.tensor([context[0].token_ids])).logits[0, -1]
    best = logits[: stage.policy.n_tokens].log_softmax(0).max(0)
    assert answer.token_ids == (int(best.indices),)
    assert answer.logprobs == pytest.approx((float(best.values),), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_and_padding_are_never_sampled(temperature: float) -> None:
    """Their rows of the head are made enormous; with nothing forbidden, the same requests draw them."""
    stage = Stage(load(tiny_folder("qwen2_5_vl")))
    special, head = stage.policy.special, stage.policy.head_weight
    assert special.image is not None and special.video is not None
    never = {special.image, special.video, *range(stage.policy.n_tokens, len(head))}
    assert len(never) > 2
    with torch.no_grad():
        head[sorted(never)] *= 1000
    requests = [(prompt(stage, "up?"), params(seed, 8, temperature)) for seed in range(12)]
    for answer in generate_all(stage, requests):
        assert never.isdisjoint(answer.token_ids)
        assert all(-30 < logprob <= 0 for logprob in answer.logprobs)
    stage.policy.forbidden_V = torch.zeros_like(stage.policy.forbidden_V)
    assert any(never.intersection(answer.token_ids) for answer in generate_all(stage, requests))


def test_either_end_token_ends_a_turn() -> None:
    stage = Stage(load(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    (free,) = generate_all(stage, [(context, params(0, 6, 0.0))])
    assert len(stage.policy.special.end_of_turn) == 2
    for end in stage.policy.special.end_of_turn:
        with torch.no_grad():
            head = stage.policy.head_weight
            kept = head[end].clone()
            head[end] = 10 * head[free.token_ids[0]]
            (answer,) = generate_all(stage, [(context, params(0, 6, 0.0))])
            head[end] = kept
        assert answer.token_ids == (end,)
        assert answer.stop_reason is StopReason.END_OF_TURN
    (cut,) = generate_all(stage, [(prompt(stage, "x"), params(3, 1))])
    ended = cut.token_ids[0] in stage.policy.special.end_of_turn
    assert cut.stop_reason is (StopReason.END_OF_TURN if ended else StopReason.TURN_BUDGET)
