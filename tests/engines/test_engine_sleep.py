"""Where all processes learn and sample, all engines give their memory back before any learner computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from npu_vlrl.engines import remote
from npu_vlrl.engines.base import Outcome, Request
from npu_vlrl.engines.local import LocalEngine
from npu_vlrl.engines.messages import WeightsChanged
from npu_vlrl.engines.serve import HandlerFactory, serve
from npu_vlrl.network.channel import Channel, Peer
from npu_vlrl.sync.buckets import WeightTarget
from tests.support.sockets import connected


class Sleeper(LocalEngine):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def sleep(self) -> None:
        self.told.append("sleep")

    def weights_changed(self, version: int) -> dict[str, float]:
        self.told.append(f"weights {version}")
        return {}

    def forget_features(self) -> None: ...
    def forget_session(self, number: int) -> None: ...
    def sample(self, requests: Sequence[Request]) -> list[Outcome]:
        return []

    def holder(self) -> WeightTarget:
        raise AssertionError("nothing is sent to who learns")


def test_all_sleep_after_a_rollout() -> None:
    near, far = (
        Channel(end, Peer(rank, "a process", "here", 1), 5.0) for end, rank in zip(connected(), (1, 0), strict=True)
    )
    here, there = Sleeper(), Sleeper()

    def world(channel: Channel) -> Any:
        limits = {"timeout_s": 5.0, "start_timeout_s": 5.0}
        return SimpleNamespace(size=2, engines=[1], channel=lambda rank: channel, close=channel.close, **limits)

    def load(scratch: Path) -> tuple[LocalEngine, HandlerFactory]:
        changed = {WeightsChanged: lambda message: there.weights_changed(message.version)}
        return there, lambda world, engine: changed

    follower = threading.Thread(target=serve, args=(world(far), load), daemon=True)
    follower.start()
    remote.begin(world(near), Path("scratch"))
    engine = remote.LearnersEngine(world(near), here)
    engine.sleep()
    engine.weights_changed(7)
    remote.stop(world(near))
    follower.join()
    assert here.told == there.told == ["sleep", "weights 7"]
