"""A game as an environment: what a turn does, earns and is told, and that one seed gives one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.config import EnvironmentConfig, WorkflowConfig
from npu_vlrl.types import DataError, EpisodeStatus, Image, Message, SegmentKind, Step, Task, Trajectory
from npu_vlrl.workflow.environments.game import GameEnvironment
from npu_vlrl.workflow.vision_multiturn import VisionMultiTurnAgenticWorkflow
from tests.support.corridor import Corridor
from tests.support.scripted import IMAGE, conversation_ids, flat, play, tiny_renderer

FORM = "<answer>…</answer>"


def environment(length: int = 5, toll: float = 0.25, **config: Any) -> GameEnvironment:
    settings = {"name": "corridor", "format": "no_think", "format_reward": 0.5, **config}
    return GameEnvironment(Corridor(length, toll), EnvironmentConfig(**settings))


def task(seed: Any) -> Task:
    return Task("corridor/1", (), None, "corridor", {"seed": seed})


def opened(env: GameEnvironment, place: int = 2, goal: int = 4) -> Message:
    (message,) = asyncio.run(env.reset(task(0)))
    env.game.place, env.game.goal = place, goal  # type: ignore[attr-defined]
    return message


def step(env: GameEnvironment, text: str) -> Step:
    return asyncio.run(env.step(text, ()))


def told(step: Step) -> str:
    (message,) = step.messages
    assert message.role == "user" and len(message.images) == 1 and isinstance(message.parts[-1], Image)
    return message.text


def test_the_opening_has_rules_actions_format_and_one_image() -> None:
    env = environment(format="free_think", max_actions=2, separator="|")
    message = opened(env)
    assert message.role == "user"
    assert message.text == (
        "Walk to the bright end of the corridor.\n"
        "Actions: Left, Right, Wait. Take up to 2 at a time, separated by '|'.\n"
        "Write exactly in this form: <think>…</think><answer>…</answer> (in <think> what you think)\n"
    )
    assert len(message.images) == 1 and message.images[0].size == (140, 28)
    assert "Take up to" not in opened(environment(max_actions=1)).text
    assert opened(environment(explain=False)).parts == opened(environment()).parts[1:]


def test_a_turn_earns_what_its_actions_earn_and_the_format_reward() -> None:
    env = environment()
    opened(env)
    first = step(env, "<answer>left, RIGHT</answer>")
    assert first.reward == -0.5 + 0.5 and first.status is None and first.verdict is not None
    assert first.verdict.terms == {"toll": -0.5, "goal": 0.0, "format": 0.5}
    assert (first.verdict.reward, first.verdict.solved) == (first.reward, False)
    assert told(first) == "Done: Left, Right.\n" and env.state_key() == "2 of 5, goal 4"
    last = step(env, "<answer>Right,Right,Wait</answer>")
    assert last.verdict is not None and last.verdict.terms == {"toll": -0.5, "goal": 1.0, "format": 0.5}
    assert (last.reward, last.status, last.verdict.solved) == (1.0, EpisodeStatus.SOLVED, True)
    assert told(last) == "Done: Right, Right.\n"
    assert (last.messages[0].images[0].rgb[0, ::28] == [[0, 0, 0]] * 4 + [[255, 255, 0]]).all()


def test_a_game_that_is_over_unsolved_is_lost() -> None:
    env = environment()
    opened(env, place=1)
    lost = step(env, "<answer>Left,Right,Right</answer>")
    assert lost.status is EpisodeStatus.LOST and lost.verdict is not None and not lost.verdict.solved
    assert lost.reward == -0.25 + 0.5 and told(lost) == "Done: Left.\n"


@pytest.mark.parametrize(
    ("text", "moved", "format_term", "message"),
    [
        ("", 0, 0.0, f"Nothing was done. Write {FORM}"),
        ("Right", 0, 0.0, f"Nothing was done. Write {FORM}"),
        ("<answer>Right", 0, 0.0, f"Nothing was done. Write {FORM}"),
        ("<answer> </answer>", 0, 0.0, f"Nothing was done. Write {FORM}"),
        ("<answer>,,</answer>", 0, 0.0, f"Nothing was done. Write {FORM}"),
        ("I go <answer>Right</answer>", 1, 0.0, f"Done: Right. Write {FORM}"),
        ("<answer>,Right,</answer>\n", 1, 0.5, "Done: Right."),
        ("<answer>Jump</answer>", 0, 0.0, "Nothing was done. There is no action 'Jump'; the actions are {all}."),
        ("<answer>Right,Up,Left</answer>", 1, 0.0, "Done: Right. There is no action 'Up'; the actions are {all}."),
        ("<answer>Right Left</answer>", 0, 0.0, "Nothing was done. There is no action 'Right Left'; the {short}"),
        ("<answer>Wait,Wait,Wait,Right</answer>", 0, 0.5, "Done: Wait, Wait, Wait. Only 3 actions count in a turn."),
        ("<answer>Wait,Wait,Wait,Up</answer>", 0, 0.5, "Done: Wait, Wait, Wait. Only 3 actions count in a turn."),
        (
            f"<answer>{'x' * 10**6}</answer>",
            0,
            0.0,
            f"Nothing was done. There is no action '{'x' * 40}'; the {{short}}",
        ),
        ("<answer>" + "Wait," * 10**5 + "</answer>", 0, 0.5, "Done: Wait, Wait, Wait. Only 3 actions count in a turn."),
    ],
)
def test_bad_turns_are_told_and_cost_the_format_reward(text: str, moved: int, format_term: float, message: str) -> None:
    env = environment()
    opened(env)
    answer = step(env, text)
    names = "Left, Right, Wait"
    assert told(answer) == message.format(all=names, short=f"actions are {names}.") + "\n"
    assert env.game.place == 2 + moved  # type: ignore[attr-defined]
    assert answer.verdict is not None and answer.verdict.terms["format"] == format_term
    assert answer.reward == sum(answer.verdict.terms.values()) and answer.status is None


def test_another_tag_token_and_separator() -> None:
    env = environment(answer_tag="ans", end_token="<eoa>", separator=" ", format="free_think")
    opened(env)
    right = step(env, "<think>go</think><ans>right  left</ans><eoa>")
    assert told(right) == "Done: Right, Left.\n" and right.verdict is not None and right.verdict.terms["format"] == 0.5
    assert told(step(env, "<answer>right</answer>")).startswith("Nothing was done. Write <think>…</think><ans>…</ans>")


class Oddly(Corridor):
    def __init__(self, *actions: str) -> None:
        super().__init__(5, 0.0)
        self.actions = actions  # type: ignore[assignment]


@pytest.mark.parametrize("actions", [("Up", "up"), ("go,up",), ("",), (" Up",)])
def test_actions_that_no_answer_could_name_are_refused(actions: tuple[str, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"must be different words, regardless of case, and not hold the separator ','"
    ):
        GameEnvironment(Oddly(*actions), EnvironmentConfig(name="x"))
    GameEnvironment(Oddly("go up"), EnvironmentConfig(name="x"))


# --- in the workflow -------------------------------------------------------------------------------------------------


def workflow(max_turns: int = 4, **config: Any) -> VisionMultiTurnAgenticWorkflow:
    settings = WorkflowConfig(max_turns=max_turns, context_tokens=2000)
    return VisionMultiTurnAgenticWorkflow(settings, tiny_renderer(), lambda: environment(**config))


def seed_for(place: int, goal: int) -> int:
    """A seed whose corridor of 5 begins like that."""
    game = Corridor(5, 0.0)
    for seed in range(1000):
        game.start(seed)
        if (game.place, game.goal) == (place, goal):
            return seed
    raise AssertionError


def test_an_episode_shows_one_image_a_turn_and_records_state_terms_and_what_was_told() -> None:
    right = "<answer>Right</answer>"
    episode = play(workflow(), [right, "nothing", "<answer>Wait</answer>", right, right], task(seed_for(2, 4)))
    assert [turn.state for turn in episode.turns] == [f"{place} of 5, goal 4" for place in (2, 3, 3, 3)]
    assert episode.status is EpisodeStatus.SOLVED and episode.turn_rewards == (0.25, 0.0, 0.25, 1.25)
    context = episode.turns[-1].context
    kinds = [SegmentKind.PROMPT, *[SegmentKind.ACTION, SegmentKind.OBSERVATION] * 3]
    assert [segment.kind for segment in context] == kinds
    assert [len(segment.images) for segment in context] == [1, 0, 1, 0, 1, 0, 1]
    assert [turn.feedback for turn in episode.turns] == [
        "Done: Right.\n",
        f"Nothing was done. Write {FORM}\n",
        "Done: Wait.\n",
        None,  # the move that ended the episode
    ]
    assert all(turn.verdict is not None for turn in episode.turns)
    opening = opened(environment()).text
    assert flat(episode.turns[1].context) == conversation_ids(
        ("system", "You are a helpful assistant."),
        ("user", opening + IMAGE),
        ("assistant", right),
        ("user", "Done: Right.\n" + IMAGE),
        images=(5, 5),
    )


def test_episodes_end_lost_or_at_their_last_turn() -> None:
    lost = play(workflow(), ["<answer>Left</answer>"] * 2, task(seed_for(1, 4)))
    assert (lost.status, len(lost.turns), lost.solved) == (EpisodeStatus.LOST, 1, False)
    waiting = play(workflow(max_turns=2), ["<answer>Wait</answer>"] * 2, task(seed_for(1, 4)))
    assert (waiting.status, len(waiting.turns)) == (EpisodeStatus.MAX_TURNS, 2)


@pytest.mark.parametrize("seed", [None, "7", 1.5])
def test_a_task_without_a_seed_fails_and_says_what_to_change(seed: Any) -> None:
    episode = play(workflow(), [], task(seed))
    assert episode.status is EpisodeStatus.FAILED
    assert episode.error == "corridor/1: the task has no seed for a game; use data.train.generator=episodes"
    with pytest.raises(DataError):
        asyncio.run(environment().reset(Task("t", (), None, "x")))
    with pytest.raises(
        DataError, match="a game makes its own prompt, and would not show this; use data.train.generator"
    ):
        asyncio.run(environment().reset(Task("t", (Message("user", ("Which way?",)),), "up", "x", {"seed": 7})))


# --- one seed, one episode -------------------------------------------------------------------------------------------


def seen(seed: int, lines: Sequence[str]) -> tuple[Any, ...]:
    """All that an episode shows and earns, images by their hashes."""
    env = environment()
    log: list[Any] = [_plain(asyncio.run(env.reset(task(seed))))]
    for line in lines:
        log.append(env.state_key())
        answer = step(env, line)
        log.append((answer.reward, answer.status, answer.verdict, _plain(answer.messages)))
        if answer.status is not None:
            break
    return tuple(log)


def _plain(messages: Sequence[Message]) -> list[Any]:
    return [(m.role, [p.hash if isinstance(p, Image) else p for p in m.parts]) for m in messages]


words = st.sampled_from(["Left", "right", "WAIT", "Jump", "", " "])
lines = st.lists(st.lists(words, max_size=4).map(lambda names: f"<answer>{','.join(names)}</answer>"), max_size=6)


@given(seed=st.integers(0, 2**32 - 1), lines=lines)
@settings(max_examples=50, deadline=None)
def test_the_same_seed_and_texts_give_the_same_episode(seed: int, lines: list[str]) -> None:
    assert seen(seed, lines) == seen(seed, lines)


def test_another_seed_or_action_gives_another_episode() -> None:
    one, other = seed_for(2, 4), seed_for(3, 4)
    assert seen(one, [])[0] != seen(other, [])[0]
    moves = [seen(one, [f"<answer>{action}</answer>"])[2][3] for action in Corridor.actions]
    assert len({str(move[0][1][1]) for move in moves}) == 3  # three images


def test_episodes_of_one_workflow_do_not_share_a_game() -> None:
    flow = workflow()

    def run(seed: int) -> Trajectory:
        return play(flow, ["<answer>Right</answer>"] * 4, task(seed))

    first = run(seed_for(1, 4))
    assert len(first.turns) == 3
    assert [t.state for t in run(seed_for(1, 4)).turns] == [t.state for t in first.turns]
