"""Loop of an engine process: it samples rounds and handles the learner's messages, until the stop message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from npu_vlrl.engines.local import LocalEngine
from npu_vlrl.engines.messages import (
    ForgetFeatures,
    Pause,
    Probe,
    RequestReader,
    Round,
    Sleep,
    pack_outcomes,
)
from npu_vlrl.network.channel import Channel
from npu_vlrl.network.messages import Begin, Failed, Message, Ready, Stop
from npu_vlrl.network.world import LEARNER, PeerError, World
from npu_vlrl.sync.files import DiskReceiver
from npu_vlrl.sync.weights import SyncError, WeightReceiver, Weights

Handlers = Mapping[type[Message], Callable[[Any], None]]
"""Handlers of messages, by the kind of message."""

HandlerFactory = Callable[[World, LocalEngine], Handlers]
"""Makes the handlers of an engine process beside those of rounds, after the ready message."""


def weights_by_transfer(world: World, engine: LocalEngine) -> Handlers:
    """Handlers of an engine that receives its weights by collectives."""
    return _by(WeightReceiver(world, engine.holder()), engine)


def weights_from_disk(world: World, engine: LocalEngine) -> Handlers:
    """Handlers of an engine that reads its weights from files that the learner writes."""
    return _by(DiskReceiver(world, engine.holder()), engine)


def _by(receiver: WeightReceiver, engine: LocalEngine) -> Handlers:
    def weights(message: Weights) -> None:
        version = receiver.receive(message)
        if version is None:
            raise SyncError("the weights that arrived were not those that were sent; this engine holds no version")
        engine.weights_changed(version)

    return {Weights: weights}


def serve(world: World, load: Callable[[Path], tuple[LocalEngine, HandlerFactory]]) -> None:
    """Serves the learner until the stop message. `load` makes the engine, given the folder of a `tiny:` model.

    Raises PeerError when the learner is gone. Any other error is sent to the learner, and raised when the learner has
    ended: a launcher ends all processes as soon as one fails, and the learner should report the reason first.
    """
    channel = world.channel(LEARNER)
    try:
        first = channel.receive()
        if isinstance(first, Stop):
            return
        assert isinstance(first, Begin), f"the learner sent {type(first).__name__} instead of Begin"
        engine, duties = load(Path(first.scratch))
        channel.send(Ready())
        handlers = {**_rounds(channel, engine), **duties(world, engine)}
        while not isinstance(message := channel.receive(), Stop):
            assert type(message) in handlers, f"the learner sent {type(message).__name__}"
            handlers[type(message)](message)
    except PeerError:
        raise
    except Exception as error:
        with suppress(PeerError):
            channel.send(Failed(f"{type(error).__name__}: {error}"))
            while not isinstance(channel.receive(), Stop):
                pass
        raise


def _rounds(channel: Channel, engine: LocalEngine) -> Handlers:
    """Handlers of rounds. A message that arrives during a round interrupts it; `Pause` does nothing else."""
    reader = RequestReader()
    engine.interrupted = channel.waiting

    def play(message: Round) -> None:
        for number in message.closed:
            engine.forget_session(number)
        outcomes = engine.sample(reader.unpack(message.requests))
        channel.send(pack_outcomes(outcomes, engine.counted()))

    def probe(message: Probe) -> None:
        outcomes = engine.sample_probe(reader.unpack(message.requests))
        channel.send(pack_outcomes(outcomes, engine.counted()))

    return {
        Round: play,
        Probe: probe,
        Pause: lambda _: None,
        Sleep: lambda _: engine.sleep(),
        ForgetFeatures: lambda _: engine.forget_features(),
    }
