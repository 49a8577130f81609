"""What an engine process does: it plays rounds and follows the learner's words, until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from npu_vlrl.rollout.local import LocalEngine
from npu_vlrl.rollout.wire import RoundReader, pack_outcomes
from npu_vlrl.sync.channel import Channel, Message
from npu_vlrl.sync.disk import DiskReceiver
from npu_vlrl.sync.weights import SyncError, WeightReceiver
from npu_vlrl.sync.world import LEARNER, PeerError, World

Handlers = Mapping[str, Callable[[Message], None]]
"""What to do with a message of each kind."""

Duties = Callable[[World, LocalEngine], Handlers]
"""What an engine process does beside rounds, once the learner knows that it is ready."""


def weights_by_transfer(world: World, engine: LocalEngine) -> Handlers:
    """Of an engine that gets its weights from the learner."""
    return _by(WeightReceiver(world, engine.holder()), engine)


def weights_from_disk(world: World, engine: LocalEngine) -> Handlers:
    """Of an engine that reads its weights from files that the learner writes."""
    return _by(DiskReceiver(world, engine.holder()), engine)


def _by(receiver: WeightReceiver, engine: LocalEngine) -> Handlers:
    def weights(message: Message) -> None:
        version = receiver.receive(message)
        if version is None:
            raise SyncError("the weights that arrived were not those that were sent; this engine holds no version")
        engine.weights_changed(version)

    return {"weights": weights}


def serve(world: World, load: Callable[[Path], tuple[LocalEngine, Duties]]) -> None:
    """`load` makes the engine, once the learner says where a `tiny:` model is.

    Raises PeerError when the learner is gone. Any other error is told to the learner, and raised when that has ended:
    whoever started the processes ends all of them as soon as one fails, and the learner should say why first.
    """
    channel = world.channel(LEARNER)
    try:
        first = channel.receive()
        if first.kind == "stop":
            return
        engine, duties = load(Path(first.content["scratch"]))
        channel.send("ready")
        handlers = {**_rounds(channel, engine), **duties(world, engine)}
        while (message := channel.receive()).kind != "stop":
            assert message.kind in handlers, f"the learner sent {message.kind}"
            handlers[message.kind](message)
    except PeerError:
        raise
    except Exception as error:
        with suppress(PeerError):
            channel.send("error", {"message": f"{type(error).__name__}: {error}"})
            while channel.receive().kind != "stop":
                pass
        raise


def _rounds(channel: Channel, engine: LocalEngine) -> Handlers:
    """A message that comes during a round interrupts it; "pause" says nothing else."""
    reader = RoundReader()
    engine.interrupted = channel.waiting

    def play(message: Message) -> None:
        for number in message.content["closed"]:
            engine.forget_session(number)
        content, blobs = pack_outcomes(engine.sample(reader.unpack(message)))
        channel.send("answers", {**content, "counts": astuple(engine.counted())}, blobs)

    def probe(message: Message) -> None:
        channel.send("answers", *pack_outcomes(engine.sample_probe(reader.unpack(message))))

    return {
        "round": play,
        "probe": probe,
        "pause": lambda _: None,
        "sleep": lambda _: engine.sleep(),
        "forget_features": lambda _: engine.forget_features(),
    }
