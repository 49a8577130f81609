"""A collective that can be given up, and what counts as a change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from npu_vlrl.hardware import HardwareError
from npu_vlrl.network.channel import Channel
from npu_vlrl.network.messages import Message, Peer
from npu_vlrl.network.world import World
from npu_vlrl.sync import transfer
from npu_vlrl.sync.buckets import in_place
from npu_vlrl.sync.plan import make_plan
from npu_vlrl.sync.transfer import POLL_S, TransferTimeout, guarded
from npu_vlrl.sync.weights import (
    Decision,
    Parameters,
    Staged,
    WeightReceiver,
    Weights,
    count_optimizer_steps,
)
from tests.support.sockets import connected


class Process:
    """What a transfer asks of a world."""

    abandoned = False

    def start(self, work: Callable[[], None]) -> None:
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def enter_thread(self) -> None: ...


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(transfer, "GRACE_S", 0.2)
    return Process()


def nothing() -> None: ...


def test_the_result_comes_back_from_the_second_thread(world: Any) -> None:
    def work() -> str:
        assert threading.current_thread() is world.thread
        return "done"

    assert guarded(work, world, nothing, 5.0) == "done"
    assert not world.abandoned


def test_a_device_that_does_not_answer_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread lives on, and the next collective tries again."""
    monkeypatch.setattr(transfer, "GRACE_S", 0.1)
    answers = iter([HardwareError("npu device 1 does not answer"), None])

    class Machine:
        def set_device(self, index: int) -> None:
            if (problem := next(answers)) is not None:
                raise problem

    world = World(Machine(), 0, (), {}, 1.0, 1.0, 1)  # type: ignore[arg-type]
    with pytest.raises(HardwareError, match="device 1 does not answer"):
        guarded(nothing, world, nothing, 5.0)
    assert guarded(lambda: "done", world, nothing, 5.0) == "done"


def test_the_second_thread_is_prepared_once_and_replaced_when_it_was_abandoned() -> None:
    prepared: list[int] = []

    class Machine:
        def set_device(self, index: int) -> None:
            prepared.append(threading.get_ident())

    world = World(Machine(), 0, (), {}, 1.0, 1.0, 0)  # type: ignore[arg-type]
    release = threading.Event()
    first, second = (guarded(threading.get_ident, world, nothing, 5.0) for _ in range(2))
    with pytest.raises(TransferTimeout):
        guarded(release.wait, world, nothing, 0.1)
    third = guarded(threading.get_ident, world, nothing, 5.0)
    assert first == second and prepared == [first, third] and third not in (first, threading.get_ident())
    release.set()


def test_a_collective_that_hangs_is_given_up_for_what_look_says(world: Any) -> None:
    release = threading.Event()
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise LookupError("engine 2 is gone")

    with pytest.raises(LookupError, match="engine 2 is gone"):
        guarded(release.wait, world, look, 50.0)
    assert world.abandoned
    release.set()


def test_a_collective_that_hangs_is_given_up_after_the_limit(world: Any) -> None:
    release = threading.Event()
    with pytest.raises(TransferTimeout):
        guarded(release.wait, world, nothing, 0.1)
    assert world.abandoned
    release.set()


def broken() -> None:
    raise RuntimeError("connection closed")


def test_an_error_of_the_collective_is_raised_here(world: Any) -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        guarded(broken, world, nothing, 5.0)
    assert world.abandoned


def test_the_reason_that_comes_after_the_error_is_raised_instead(world: Any) -> None:
    began = time.monotonic()

    def look() -> None:
        if time.monotonic() - began > 0.1:
            raise LookupError("engine 2 is gone")

    with pytest.raises(LookupError):
        guarded(broken, world, look, 5.0)


def test_a_word_of_the_learner_that_comes_at_once_is_its_answer(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its end, although the thread that said the checksums has not come back yet."""
    learner, engine = (Channel(end, Peer(0, "learner", "here", 1), 5.0) for end in connected())
    world.timeout_s, world.weights_group, world.channel = 5.0, None, lambda rank: engine
    receiver, say = WeightReceiver(world, in_place({})), engine.send

    def answered(message: Message) -> None:
        say(message)
        learner.send(Decision(commit=True))
        time.sleep(5 * POLL_S)

    monkeypatch.setattr(engine, "send", answered)
    assert receiver.receive(Weights(3, make_plan([], 512).checksum, [], 512)) == 3
    assert [learner.receive(5.0) for _ in range(2)] == [Parameters([]), Staged([])]


class Silent(torch.optim.Optimizer):
    """Writes without counting in any release of torch, as fused optimisers do in some."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)


def counted(kind: type[torch.optim.Optimizer], **options: object) -> list[bool]:
    """Whether a step shows in the version counters of two parameters, of which the first has a gradient."""
    parameters = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(2)]
    parameters[0].grad = torch.ones(3, 2)
    before = [parameter.detach().clone() for parameter in parameters]
    kind(parameters, **options).step()
    assert [bool((old != new).any()) for old, new in zip(before, parameters, strict=True)] == [True, False]
    return [parameter._version > 0 for parameter in parameters]


def test_every_step_counts_as_a_change_of_what_it_changed() -> None:
    assert count_optimizer_steps() is count_optimizer_steps(), "one hook, however many senders"
    assert counted(Silent) == [True, False]
    assert counted(torch.optim.AdamW, fused=True) == [True, False]


def test_without_the_hook_a_silent_step_does_not_count() -> None:
    count_optimizer_steps().remove()
    count_optimizer_steps.cache_clear()
    try:
        assert counted(Silent) == [False, False]
    finally:
        count_optimizer_steps()
