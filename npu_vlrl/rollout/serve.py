"""What an engine process does: it plays rounds and takes new weights, as the learner says, until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path

from npu_vlrl.rollout.inprocess import InProcessEngine
from npu_vlrl.rollout.wire import RoundReader, pack_outcomes
from npu_vlrl.sync.channel import Channel
from npu_vlrl.sync.weights import WeightReceiver
from npu_vlrl.sync.world import LEARNER, PeerError, World


def serve(world: World, load: Callable[[Path], InProcessEngine]) -> None:
    """`load` makes the engine, once the learner says where a `tiny:` model is.

    Raises PeerError when the learner is gone. Any other error is told to the learner, and raised when that has ended:
    whoever started the processes ends all of them as soon as one fails, and the learner should say why first.
    """
    channel = world.channel(LEARNER)
    try:
        _serve(world, channel, load)
    except PeerError:
        raise
    except Exception as error:
        with suppress(PeerError):
            channel.send("error", {"message": f"{type(error).__name__}: {error}"})
            while channel.receive().kind != "stop":
                pass
        raise


def _serve(world: World, channel: Channel, load: Callable[[Path], InProcessEngine]) -> None:
    first = channel.receive()
    if first.kind == "stop":
        return
    engine = load(Path(first.content["scratch"]))
    channel.send("ready")
    receiver = WeightReceiver(world, dict(engine.policy.model.named_parameters()))
    reader = RoundReader()
    while True:
        message = channel.receive()
        match message.kind:
            case "round":
                for number in message.content["closed"]:
                    engine.forget_session(number)
                content, blobs = pack_outcomes(engine.sample(reader.unpack(message)))
                vision = engine.vision
                counts = replace(engine.counts, images_referenced=vision.referenced, images_encoded=vision.encoded)
                channel.send("answers", {**content, "counts": astuple(counts)}, blobs)
            case "weights":
                version = receiver.receive(message)
                if version is not None:
                    engine.weights_changed(version)
            case "forget_features":
                engine.forget_features()
            case "stop":
                return
            case kind:
                raise AssertionError(f"the learner sent {kind}")
