"""Budgets: of a turn, of an episode, and of images, which are never cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from npu_vlrl.report.results import answer_of
from npu_vlrl.report.run_folder import trajectory_record
from npu_vlrl.types import EpisodeStatus, Generation, SegmentKind, StopReason, Verdict
from npu_vlrl.workflow.export import outcome
from npu_vlrl.workflow.render import Renderer
from tests.support.scripted import (
    END,
    IMAGE,
    Script,
    Verdicts,
    a_task,
    an_image,
    conversation_ids,
    cut,
    decode,
    encode,
    flat,
    play,
    processor,
    tokenizer,
    workflow,
)

WRONG, RIGHT = Verdict(0.0, False), Verdict(1.0, True)
SYSTEM = ("system", "You are a helpful assistant.")
TASK = a_task(an_image(28), "?", hidden_image=an_image(56))
PROMPT = len(conversation_ids(SYSTEM, ("user", f"{IMAGE}?"), images=[1]))
LOOKING: dict[str, Any] = {"tools": ("look",), "describe_tools": False, "turn_tokens": 40}
LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
CALL = len(encode(LOOK + END))
SHOWN = f"\n<|im_start|>user\n<tool_response>\nImage 1 is what you see.{IMAGE}\n</tool_response>{END}\n"
SHOW = len(encode(SHOWN + "<|im_start|>assistant\n")) + 3  # the image is 4 tokens, not 1
FEEDBACK = len(encode(f"\n<|im_start|>user\nNo. Try again.{END}\n<|im_start|>assistant\n"))


class Rambling(Script):
    """Samples as many tokens as it may and never ends a turn."""

    async def generate(self, context, sampling):  # type: ignore[no-untyped-def]
        await super().generate(context, sampling)
        n = sampling.max_new_tokens
        return Generation(encode("a") * n, (-1.0,) * n, (0,) * n, StopReason.TURN_BUDGET)


def test_a_model_that_never_stops_leaves_room_for_the_other_turns() -> None:
    script = Rambling(itertools.repeat(""))
    episode = play(workflow(Verdicts([WRONG] * 3), max_turns=3, turn_tokens=8), script, TASK)
    assert episode.status is EpisodeStatus.MAX_TURNS
    assert [len(turn.action) for turn in episode.turns] == [8, 8, 8]
    assert {turn.action.stop_reason for turn in episode.turns} == {StopReason.TURN_BUDGET}


def test_the_budget_of_a_turn_is_what_the_context_leaves() -> None:
    """By hand: prompt, 8 tokens, closing token and feedback, and 5 tokens that are left of the context."""
    context = PROMPT + 8 + 1 + FEEDBACK + 5
    script = Rambling(itertools.repeat(""))
    flow = workflow(Verdicts([WRONG] * 3), max_turns=3, turn_tokens=8, context_tokens=context)
    episode = play(flow, script, TASK)
    assert [params.max_new_tokens for params in script.params] == [8, 5]
    stops = [turn.action.stop_reason for turn in episode.turns]
    assert stops == [StopReason.TURN_BUDGET, StopReason.CONTEXT_FULL]
    assert episode.status is EpisodeStatus.CONTEXT_FULL
    assert len(flat(episode.turns[1].context)) + len(episode.turns[1].action) == context


def test_a_turn_that_ends_itself_within_a_short_budget_is_an_ended_turn() -> None:
    flow = workflow(Verdicts([RIGHT]), turn_tokens=8, context_tokens=PROMPT + 5)
    (turn,) = play(flow, ["up"], TASK).turns
    assert turn.action.stop_reason is StopReason.END_OF_TURN


@pytest.mark.parametrize(("room", "turns"), [(0, 1), (1, 2)])
def test_feedback_enters_when_it_leaves_room_for_a_token(room: int, turns: int) -> None:
    said = encode("down" + END)
    context = PROMPT + len(said) + FEEDBACK + room
    script = Script(["down", cut("u")])
    episode = play(workflow(Verdicts([WRONG, WRONG]), context_tokens=context, turn_tokens=8), script, TASK)
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.CONTEXT_FULL, turns)
    told = ["No. Try again."] * (turns - 1)
    assert [turn.feedback for turn in episode.turns] == [*told, None]
    if turns == 2:
        assert script.params[1].max_new_tokens == 1


@pytest.mark.parametrize(
    ("room", "status", "turns"),
    [
        (1, EpisodeStatus.SOLVED, 2),
        (0, EpisodeStatus.IMAGE_DOES_NOT_FIT, 1),
        (-3, EpisodeStatus.IMAGE_DOES_NOT_FIT, 1),
        (-4, EpisodeStatus.CONTEXT_FULL, 1),  # not even without the 4 tokens of the image
    ],
)
def test_an_image_enters_with_all_its_tokens_or_not_at_all(room: int, status: EpisodeStatus, turns: int) -> None:
    context = PROMPT + CALL + SHOW + room
    lines: list[str | Generation] = [LOOK, Generation(encode("u"), (-1.0,), (0,), StopReason.END_OF_TURN)]
    settings = {**LOOKING, "context_tokens": context}
    episode = play(workflow(Verdicts([RIGHT]), **settings), lines, TASK)
    assert (episode.status, len(episode.turns)) == (status, turns)
    images = [image.n_tokens for segment in episode.turns[-1].context for image in segment.images]
    assert images == ([1, 4] if turns == 2 else [1])
    assert len(flat(episode.turns[-1].context)) < context


def test_every_limit() -> None:
    """Whatever the limit: it is kept, images are whole, and the episode ends for the reason that arithmetic gives."""
    shown = PROMPT + CALL + SHOW
    told = shown + len(encode("down" + END)) + FEEDBACK
    for context in range(10, told + 9):
        settings = {**LOOKING, "context_tokens": context}
        episode = play(workflow(Verdicts([WRONG, RIGHT]), max_turns=3, **settings), Cut([LOOK, "down", "up"]), TASK)
        assert sum(len(segment) for turn in episode.turns[-1:] for segment in (*turn.context, turn.action)) <= context
        for segment in (segment for turn in episode.turns for segment in turn.context):
            pads = segment.token_ids.count(encode("<|image_pad|>")[0])
            assert pads == sum(image.n_tokens for image in segment.images)
        if context <= PROMPT:
            assert episode.status is EpisodeStatus.FAILED
        elif shown - 3 <= context <= shown:
            assert episode.status is EpisodeStatus.IMAGE_DOES_NOT_FIT
        elif context <= told:
            assert episode.status is EpisodeStatus.CONTEXT_FULL
        else:
            assert episode.status is EpisodeStatus.SOLVED


class Cut(Script):
    """What the budget leaves of each line."""

    async def generate(self, context, sampling):  # type: ignore[no-untyped-def]
        whole = await super().generate(context, sampling)
        n = min(len(whole.token_ids), sampling.max_new_tokens)
        stop = whole.stop_reason if n == len(whole.token_ids) else StopReason.TURN_BUDGET
        return Generation(whole.token_ids[:n], whole.logprobs[:n], whole.weight_versions[:n], stop)


@pytest.mark.parametrize("context", [PROMPT, PROMPT - 1, 20])
def test_a_prompt_that_cannot_fit_fails_with_its_name_and_the_remedy(context: int) -> None:
    script = Script([])
    episode = play(workflow(Verdicts([]), turn_tokens=4, context_tokens=context), script, TASK)
    assert (episode.status, episode.turns, script.contexts) == (EpisodeStatus.FAILED, (), [])
    for part in ("t/1: ", f"has {PROMPT} tokens", f"workflow.context_tokens={context}", "model.max_pixels"):
        assert part in f"{episode.error}"
    fits = play(workflow(Verdicts([RIGHT]), turn_tokens=4, context_tokens=PROMPT + 1), [cut("u")], TASK)
    assert fits.status is EpisodeStatus.SOLVED


def test_images_for_a_text_model_fail_with_a_clear_message() -> None:
    text_only = Renderer(tokenizer(), None, template_name="text")
    episode = play(workflow(Verdicts([]), text_only), Script([]), TASK)
    assert episode.status is EpisodeStatus.FAILED
    assert f"{episode.error}".startswith("t/1: ") and "text-only model" in f"{episode.error}"
    assert play(workflow(Verdicts([RIGHT]), text_only), ["a"], a_task("?")).status is EpisodeStatus.SOLVED


def test_a_reply_that_cannot_be_rendered_fails_the_sample_and_keeps_what_was_said() -> None:
    broken = Verdict(0.0, False, feedback="half \ud800 a pair")
    episode = play(workflow(Verdicts([broken])), ["down"], TASK)
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.FAILED, 1)
    assert "surrogate" in f"{episode.error}"


def test_rewriting_templates_keep_the_images_of_the_history() -> None:
    """A template that drops earlier thoughts: each turn has a context of its own, with every image in it."""
    template = str(tokenizer().chat_template)
    for text in ("message.content", "part.text"):
        template = template.replace(f"{{{{ {text} }}}}", f"{{{{ {text}.split('</think>')[-1] }}}}")
    dropping = Renderer(tokenizer(), processor(), "dropping", chat_template=template)
    settings: dict[str, Any] = {"tools": ("look",), "describe_tools": False}
    lines = ["<think>hm</think>" + LOOK, "up"]
    episode = play(workflow(Verdicts([RIGHT]), dropping, **settings), lines, TASK)
    assert episode.status is EpisodeStatus.SOLVED and episode.rewritten_turn() == 1
    (context,) = episode.turns[1].context
    assert context.kind is SegmentKind.PROMPT
    assert [image.n_tokens for image in context.images] == [1, 4]
    assert "hm" not in decode([context])


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (9, 1.5), (10, 2.0)])
def test_the_last_tokens_of_a_turn_cost_more_and_more(tokens: int, penalty: float) -> None:
    """From 0 after token 6 to 2 after token 10; the verdict stays the judge's own."""
    line = Generation(encode("a") * tokens, (-1.0,) * tokens, (0,) * tokens, StopReason.TURN_BUDGET)
    limits = {"turn_tokens": 10, "overlong_tokens": 4, "overlong_penalty": 2.0, "max_turns": 1}
    (turn,) = play(workflow(Verdicts([Verdict(0.5, False)]), **limits), [line], TASK).turns  # type: ignore[arg-type]
    assert turn.action.reward == pytest.approx(0.5 - penalty)
    assert turn.verdict is not None and turn.verdict.reward == 0.5
    (free,) = play(workflow(Verdicts([Verdict(0.5, False)]), turn_tokens=10, max_turns=1), [line], TASK).turns
    assert free.action.reward == 0.5


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (True, {"best": 0.5 - 2.0, "last": 0.5 - 2.0, "sum": 0.25 + 0.5 - 2.0}),
        (False, {"best": 0.5 - 1.0, "last": 0.5 - 1.0, "sum": 0.25 + 0.5 - 1.0}),
    ],
)
def test_an_overlong_turn_costs_in_every_reward_mode(first: bool, expected: dict[str, float]) -> None:
    """Rewards 0.25 and 1, of which the second counts half, as does its penalty of 2. The run's record says the same."""
    line = Generation(encode("a") * 10, (-1.0,) * 10, (0,) * 10, StopReason.TURN_BUDGET)
    limits: dict[str, Any] = {"turn_tokens": 10, "overlong_tokens": 4, "overlong_penalty": 2.0, "max_turns": 2}
    verdicts = Verdicts([Verdict(0.25, False), Verdict(1.0, True)])
    played = play(workflow(verdicts, **limits), [line, "b"] if first else ["b", line], TASK)
    for mode, value in expected.items():
        assert outcome(played, mode, 0.5) == pytest.approx(value)  # type: ignore[arg-type]
        assert answer_of(trajectory_record(played, {}), mode, 0.5).reward == pytest.approx(value)  # type: ignore[arg-type]
