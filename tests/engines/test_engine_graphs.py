"""Decoding where steps are recorded: the same answers, from tensors that stay where they are, in batches of few sizes.

There is nothing to record on a CPU. The stand-in here keeps the work and runs it again at each replay, as a device runs
its record: without the host knowing what the tensors hold by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from npu_vlrl.engines.base import Request
from npu_vlrl.engines.inprocess.engine import InProcessEngine
from npu_vlrl.types import Generation, SamplingParams
from tests.support.episodes import Stage
from tests.support.models import KINDS, is_vision, load, loaded, tiny_folder
from tests.support.rounds import LOOKS, continued, generate_all, params, prompt, run, watched


class Tape:
    """Records; counts records and replays, and refuses all that waits for a device while a record is made or runs."""

    def __init__(self) -> None:
        self.records = self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.records += 1
        with _nothing_waits():
            work()
            work()

        def replay() -> None:
            self.replays += 1
            with _nothing_waits():
                work()

        return replay


@contextmanager
def _nothing_waits() -> Iterator[None]:
    """Every way from a tensor to a host's number fails, and so does a shape that depends on values."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a recorded step waits for the device")

    names = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy", "unique")
    with mock.patch.multiple(torch.Tensor, **dict.fromkeys(names, refuse)):
        yield


def recorded(stage: Stage) -> Tape:
    tape = Tape()
    stage.engine = InProcessEngine(stage.policy, stage.vision, new_capture=lambda: tape)
    return tape


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_answers_as_step_by_step(kind: str) -> None:
    """Rows of many lengths and settings, over three turns."""
    plain, other = Stage(loaded(tiny_folder(kind))), Stage(loaded(tiny_folder(kind)))
    tape = recorded(other)
    settings = [
        SamplingParams(23, 1.0, seed=1),
        SamplingParams(2, 0.7, seed=2),
        SamplingParams(9, 0.0),
        SamplingParams(40, 1.0, top_k=5, seed=4),
        SamplingParams(17, 1.3, top_p=0.8, seed=5),
    ]
    contexts = [prompt(plain, *(LOOKS[:n] if is_vision(kind) else ()), "up?") for n in (0, 1, 2, 0, 1)]

    def play(stage: Stage) -> list[list[Generation]]:
        sessions = [stage.engine.session() for _ in settings]
        now, answers = list(contexts), []
        for _ in range(3):
            turn = run(*(s.generate(c, one) for s, c, one in zip(sessions, now, settings, strict=True)))
            answers.append(turn)
            now = [continued(stage, c, a, "No.") for c, a in zip(now, turn, strict=True)]
        return answers

    wanted, found = play(plain), play(other)
    for ours, theirs in zip(sum(found, []), sum(wanted, []), strict=True):
        assert ours.token_ids == theirs.token_ids and ours.stop_reason is theirs.stop_reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert tape.replays > 20 and plain.engine.counts == other.engine.counts


def test_few_sizes_are_recorded_and_each_once() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    tape = recorded(stage)
    context = prompt(stage, "up?")
    requests = [(context, params(seed, 30)) for seed in range(11)]
    generate_all(stage, requests)
    first = tape.records
    assert 1 <= first <= 5  # of 12, 8, 4, 2 and 1 rows
    with watched(stage.policy.text.embed_tokens) as embedded:
        generate_all(stage, requests)
    assert tape.records == first, "the second round runs on what the first recorded"
    assert {shape[0] for shape in embedded[1:]} <= {12, 8, 4, 2, 1}


def test_new_weights_are_used_by_what_was_recorded_before() -> None:
    stage = Stage(load(tiny_folder("qwen3")))
    recorded(stage)
    context = prompt(stage, "up?")
    before = generate_all(stage, [(context, params(0, 12))])
    with torch.no_grad():
        for parameter in stage.policy.trainable().values():
            parameter.mul_(1.1)
    stage.engine.weights_changed(1)
    (after,) = generate_all(stage, [(context, params(0, 12))])
    changed = Stage(load(tiny_folder("qwen3")))
    with torch.no_grad():
        for parameter in changed.policy.trainable().values():
            parameter.mul_(1.1)
    (wanted,) = generate_all(changed, [(context, params(0, 12))])
    assert after.token_ids == wanted.token_ids and after.weight_versions[0] == 1
    assert after.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    assert after.logprobs != pytest.approx(before[0].logprobs, abs=1e-3)


def test_a_longer_turn_gets_a_larger_batch_and_new_records() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    tapes: list[Tape] = []

    def new() -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    stage.engine = InProcessEngine(stage.policy, stage.vision, new_capture=new)
    for tokens in (5, 3, 300, 200):
        (answer,) = generate_all(stage, [(prompt(stage, "up?"), params(3, tokens))])
        (wanted,) = generate_all(Stage(loaded(tiny_folder("qwen3"))), [(prompt(stage, "up?"), params(3, tokens))])
        assert answer.token_ids == wanted.token_ids
    assert len(tapes) == 2 and all(tape.records == 1 for tape in tapes)


def test_rounds_of_different_shape_share_one_batch_where_memory_allows() -> None:
    """Many short turns, then one long, then both again: recorded for the first, and for what holds both."""
    stage = Stage(loaded(tiny_folder("qwen3")))
    context, per_token = prompt(stage, "up?"), 512
    room = 128 * -(-(len(context[0]) + 300) // 128)
    for budget, batches in ((2**30, 2), (8 * 128 * per_token, 5)):
        made: list[Tape] = []

        def new(made: list[Tape] = made) -> Tape:
            made.append(Tape())
            return made[-1]

        stage.engine = InProcessEngine(stage.policy, stage.vision, cache_bytes=budget, new_capture=new)
        for rows, tokens in ((8, 10), (1, 300), (8, 10), (1, 300), (8, 10)):
            answers = generate_all(stage, [(context, params(seed, tokens)) for seed in range(rows)])
            assert all(isinstance(answer, Generation) for answer in answers)
        assert len(made) == batches
        batch = stage.engine._batch
        assert batch is not None and (batch.rows, batch.room) == ((8, room) if batches == 2 else (8, 128))


def test_turns_wait_where_the_memory_has_no_room_for_all() -> None:
    """Room for two rows at a time; and what is kept between turns has no room for a third, which is computed again."""
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    settings = [params(seed, 8) for seed in range(5)]
    wanted = generate_all(stage, [(context, one) for one in settings])
    per_token = 2 * 2 * 2 * 16 * 4
    layers, heads, width = stage.policy.kv_shape
    assert per_token == 2 * layers * heads * width * 4
    small = InProcessEngine(stage.policy, stage.vision, cache_bytes=2 * per_token * (len(context[0]) + 8))
    stage.engine = small
    sessions = [small.session() for _ in settings]
    with watched(stage.policy.text.embed_tokens) as embedded:
        found = run(*(s.generate(context, one) for s, one in zip(sessions, settings, strict=True)))
    assert [a.token_ids for a in found] == [a.token_ids for a in wanted]
    assert sum(shape == (len(context[0]),) for shape in embedded) == 3  # two, two and one
    assert max(shape[0] for shape in embedded if shape != (len(context[0]),)) == 2
    before = small.counts.tokens_prefilled
    longer = [continued(stage, context, answer, "Again.") for answer in found]
    again = run(*(s.generate(c, one) for s, c, one in zip(sessions, longer, settings, strict=True)))
    alone = generate_all(Stage(loaded(tiny_folder("qwen3"))), list(zip(longer, settings, strict=True)))
    assert [a.token_ids for a in again] == [a.token_ids for a in alone]
    kept = sum(1 + len(c[-1]) for c in longer)
    whole = sum(sum(map(len, c)) for c in longer)
    assert kept < small.counts.tokens_prefilled - before < whole


def test_what_is_not_a_number_does_not_reach_later_turns() -> None:
    stage = Stage(load(tiny_folder("qwen3")))
    tape = recorded(stage)
    context = prompt(stage, "up?")
    (wanted,) = generate_all(stage, [(context, params(1))])
    weight = stage.policy.text.layers[0].input_layernorm.weight
    right = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    failed: Any = generate_all(stage, [(context, params(1))])
    assert isinstance(failed[0], ValueError) and "not finite" in str(failed[0])
    with torch.no_grad():
        weight.copy_(right)
    (found,) = generate_all(stage, [(context, params(1))])
    assert found.token_ids == wanted.token_ids and tape.records >= 1


def test_the_stand_in_sees_a_step_that_waits() -> None:
    stage = Stage(load(tiny_folder("qwen3")))
    recorded(stage)
    step = stage.policy.hidden_continued

    def waits(*given: Any) -> torch.Tensor:
        hidden = step(*given)
        assert hidden.sum().item() < 1e9
        return hidden

    stage.policy.hidden_continued = waits  # type: ignore[method-assign]
    ids = tuple(prompt(stage, "up?")[0].token_ids)
    (failed,) = stage.engine.sample([Request(0, ids, (), params(1, 4))])
    assert isinstance(failed, AssertionError) and "waits for the device" in str(failed)
