"""Rounds of the in-process engine: nobody waits forever, nothing broken goes unnoticed, nothing stale is used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from npu_vlrl.engines.base import Session
from npu_vlrl.types import Generation
from tests.support.episodes import Reply, Stage, task
from tests.support.models import KINDS, is_vision, load, loaded, tiny_folder
from tests.support.rounds import LOOKS, continued, generate_all, params, prompt, run, watched

# Nobody waits forever


def test_a_round_waits_for_every_open_session() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")

    async def late(session: Session) -> Generation:
        for _ in range(5):
            await asyncio.sleep(0)
        return await session.generate(context, params(1))

    first, second = stage.engine.session(), stage.engine.session()
    with watched(stage.policy.text.embed_tokens) as embedded:
        run(first.generate(context, params(0)), late(second))
    assert embedded[0] == (len(context[0]),) and embedded[1] == (2,)
    assert stage.engine.counts.turns == 2


def test_a_session_that_closes_lets_the_others_go_on() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    stays, leaves = stage.engine.session(), stage.engine.session()

    async def leave() -> None:
        await asyncio.sleep(0.01)
        leaves.close()

    answer, _ = run(stays.generate(prompt(stage, "up?"), params(0)), leave())
    assert isinstance(answer, Generation)
    stays.close()
    leaves.close()  # twice is harmless


def test_an_episode_cancelled_while_it_waits_is_forgotten() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    stays, cancelled, busy = (stage.engine.session() for _ in range(3))

    async def episode(session: Session, seed: int) -> Generation:
        try:
            return await session.generate(context, params(seed))
        finally:
            session.close()

    async def play() -> Generation:
        tasks = [asyncio.create_task(episode(s, seed)) for seed, s in enumerate((stays, cancelled))]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert not tasks[0].done(), "the round must still wait for the third session"
        busy.close()
        return await tasks[0]

    (answer,) = run(play())
    assert isinstance(answer, Generation)
    assert stage.engine.counts.turns == 1


def test_sessions_opened_in_the_same_breath_join_the_round() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")

    async def play() -> None:
        first = asyncio.create_task(stage.engine.session().generate(context, params(0)))
        await asyncio.sleep(0)  # the round is full now, and has been called for
        await asyncio.gather(first, stage.engine.session().generate(context, params(1)))

    with watched(stage.policy.text.embed_tokens) as embedded:
        run(play())
    assert embedded[0] == (len(context[0]),) and embedded[1] == (2,)


@pytest.mark.parametrize("works", [True, False])
def test_a_request_that_nobody_awaits_any_more_is_harmless(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session is still open, so the round computes it; only its answer has nowhere to go."""
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    if not works:
        monkeypatch.setattr(stage.policy, "hidden_continued", lambda *_: 1 / 0)

    async def play() -> Generation:
        gone = asyncio.create_task(stage.engine.session().generate(context, params(0)))
        other = stage.engine.session()
        await asyncio.sleep(0)
        gone.cancel()
        return await other.generate(context, params(1))

    (answer,) = run(play())
    assert isinstance(answer, Generation if works else ZeroDivisionError)


def test_an_episode_that_fails_does_not_hold_up_the_others() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    tasks = [task("long", ["up " * 5000], Reply("no")), task("fine", ["up?"], Reply("no"))]
    long, fine = stage.play(tasks, members=1)
    assert long.error is not None and "context_tokens=4000" in long.error
    assert fine.error is None and len(fine.turns) == 2


def test_an_error_of_the_model_reaches_every_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(load(tiny_folder("qwen3")))
    stage.policy.model.train()
    requests = [(prompt(stage, "up?"), params(0)), (prompt(stage, "down?"), params(1))]

    def broken(*_: Any) -> None:
        assert not stage.policy.model.training
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(stage.policy, "hidden_continued", broken)
        failures: Any = generate_all(stage, requests)
    assert [type(failure) for failure in failures] == [MemoryError, MemoryError]
    assert stage.policy.model.training
    assert all(isinstance(answer, Generation) for answer in generate_all(stage, requests))


def test_misuse_is_refused() -> None:
    stage = Stage(loaded(tiny_folder("qwen3")))
    context = prompt(stage, "up?")
    session = stage.engine.session()
    for broken in (([], params(0)), (context, params(0, tokens=0))):
        (error,) = run(session.generate(*broken))
        assert isinstance(error, ValueError)
    other = stage.engine.session()

    async def twice() -> None:
        first = asyncio.create_task(session.generate(context, params(0)))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="waits"):
            await session.generate(context, params(1))
        other.close()
        await first

    run(twice())
    session.close()
    (error,) = run(session.generate(context, params(0)))
    assert isinstance(error, AssertionError)


# What is not finite


class Poisoned:
    """The real processor, but for one image whose patches are not numbers."""

    def __init__(self, processor: Any, bad: Any) -> None:
        self.processor, self.bad = processor, bad

    def patches(self, image: Any) -> torch.Tensor:
        patches = self.processor.patches(image)
        return patches * torch.nan if image.image == self.bad else patches


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_sample_that_is_not_finite_fails_alone_and_by_name(temperature: float) -> None:
    stage = Stage(loaded(tiny_folder("qwen2_5_vl")))
    stage.vision.processor = Poisoned(stage.loaded.processor, LOOKS[0])
    tasks = [
        task("fine", [LOOKS[1], "up?"], Reply("no")),
        task("bad", [LOOKS[0], "up?"], Reply("no")),
        task("turns bad", ["up?"], Reply("see", (LOOKS[0],))),
    ]
    fine, bad, turned = stage.play(tasks, members=1, temperature=temperature)
    assert fine.error is None and len(fine.turns) == 2
    assert bad.error is not None and bad.error.startswith("bad: token 1 of this turn has the log-probability nan")
    assert turned.error is not None and turned.error.startswith("turns bad: token 1")
    assert len(turned.turns) == 1


def test_weights_that_are_not_finite_end_every_episode() -> None:
    stage = Stage(load(tiny_folder("qwen3")))
    with torch.no_grad():
        stage.policy.head_weight.fill_(torch.nan)
    played = stage.play([task("a", ["x"]), task("b", ["y"])])
    assert all(t.error is not None and "not finite" in t.error for t in played)


# Versions


@pytest.mark.parametrize("kind", KINDS)
def test_after_new_weights_a_session_answers_like_a_fresh_engine(kind: str) -> None:
    stage = Stage(load(tiny_folder(kind)))
    images = LOOKS if is_vision(kind) else []
    context = prompt(stage, *images, "up?")
    session = stage.engine.session()
    stage.engine.weights_changed(3)
    (first,) = run(session.generate(context, params(1)))
    assert first.weight_versions == (3,) * len(first.token_ids)
    longer = continued(stage, context, first, "Again.")
    with torch.no_grad():
        for parameter in stage.policy.model.parameters():
            parameter.mul_(1.1)
    stage.engine.weights_changed(3)  # the same number again: a resumed or warm-started run counts from 0 twice
    (second,) = run(session.generate(longer, params(2)))
    session.close()
    (alone,) = generate_all(Stage(stage.loaded), [(longer, params(2))])
    assert second.token_ids == alone.token_ids
    assert second.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
