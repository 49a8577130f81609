"""Messages over a real connection: what arrives, and what is said when the other end is gone, silent or a stranger."""

from __future__ import annotations

import math
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from npu_vlrl.hardware import HardwareError
from npu_vlrl.hardware.cpu import CpuPlatform
from npu_vlrl.network import world
from npu_vlrl.network.channel import Channel, PeerError
from npu_vlrl.network.messages import Failed, Message, Peer, Ready, Stop, Welcome
from tests.support.sockets import connected

LEARNER, ENGINE = Peer(0, "learner", "here", 11), Peer(1, "engine 1", "there", 12)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel to `ENGINE`, and that one's bare socket."""
    near, far = connected()
    channel = Channel(near, ENGINE, timeout_s=0.3)
    yield channel, far
    channel.close()
    far.close()


class Everything(Message):
    """One field of each type that messages have."""

    number: float
    counts: list[int]
    raw: bytes
    peer: Peer | None


def test_a_message_arrives_as_it_was_sent(ends: tuple[Channel, socket.socket]) -> None:
    near, far = ends
    other = Channel(far, LEARNER, 5.0)
    large = bytes(range(256)) * 20000  # more than a socket holds
    message = Everything(-0.0, [2**63 - 1, -(2**63)], large, ENGINE)
    sending = threading.Thread(target=other.send, args=(message,))
    sending.start()
    arrived = near.receive(5.0)
    sending.join()
    assert arrived == message and isinstance(arrived, Everything)
    assert math.copysign(1, arrived.number) == -1 and type(arrived.raw) is bytes
    other.send(Everything(math.nan, [], b"", None))
    again = near.receive()
    assert isinstance(again, Everything) and math.isnan(again.number)


def test_names_of_messages_are_unique() -> None:
    import npu_vlrl.acceptance.training
    import npu_vlrl.engines.messages
    import npu_vlrl.learner.messages
    import npu_vlrl.sync.files  # noqa: F401

    names = [kind.__name__ for kind in Message.__subclasses__()]
    assert len(names) == len(set(names)) > 15


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        (b"Nonsense", {}, "sent 'Nonsense', which is no message here"),
        (b"Failed", {"reason": 3}, r"sent a malformed Failed \(Expected `str`, got `int` - at `\$.reason`\)"),
        (b"Failed", {}, "sent a malformed Failed .*missing required field `reason`"),
        (b"Ready", {"more": 1}, "sent a malformed Ready .*unknown field `more`"),
    ],
)
def test_a_message_of_another_release_is_refused(
    ends: tuple[Channel, socket.socket], name: bytes, body: dict[str, Any], said: str
) -> None:
    near, far = ends
    packed = msgspec.msgpack.encode(body)
    far.sendall(struct.pack("<HQ", len(name), len(packed)) + name + packed)
    with pytest.raises(PeerError, match=f"^engine 1 .* {said}"):
        near.receive(1.0)


def test_what_is_expected_comes_or_the_reason_why_not(ends: tuple[Channel, socket.socket]) -> None:
    near, far = ends
    other = Channel(far, LEARNER, 5.0)
    for message in (Ready(), Failed("no memory"), Stop()):
        other.send(message)
    assert near.expect(Ready, 5.0, OSError) == Ready()  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"^engine 1 \(rank 1, process 12 on there\): no memory$"):
        near.expect(Ready, 5.0, OSError)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="^engine 1 .* gave up in the middle of the work"):
        near.expect(Ready, 5.0, OSError)  # type: ignore[arg-type]


def test_a_silent_peer_is_named(ends: tuple[Channel, socket.socket]) -> None:
    near, _ = ends
    near.check_alive()
    assert not near.waiting()
    with pytest.raises(PeerError, match=r"^engine 1 \(rank 1, process 12 on there\) did not answer within 0.1 s; its"):
        near.receive(0.1)


def test_a_peer_that_stops_in_the_middle_is_named(ends: tuple[Channel, socket.socket]) -> None:
    near, far = ends
    far.sendall(struct.pack("<HQ", 5, 20) + b"Ready" + b"\x80")
    with pytest.raises(PeerError, match=r"stopped in the middle of a message for 0\.3 s"):
        near.receive(1.0)


def test_a_peer_that_takes_nothing_is_named(ends: tuple[Channel, socket.socket]) -> None:
    with pytest.raises(PeerError, match=r"took no data for 0\.3 s"):
        ends[0].send(Failed("x" * 2**25))


def test_no_room_is_made_for_an_impossible_message(ends: tuple[Channel, socket.socket]) -> None:
    near, far = ends
    far.sendall(struct.pack("<HQ", 5, 2**62))
    with pytest.raises(PeerError, match=f"message of {2**62} bytes, which none has"):
        near.receive(1.0)


@pytest.mark.parametrize("rude", [False, True])
def test_a_peer_that_ends_is_named_by_every_call(ends: tuple[Channel, socket.socket], rude: bool) -> None:
    near, far = ends
    if rude:  # the connection is reset, as by a process that is killed with data unread
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    assert near.waiting(5.0)
    with pytest.raises(PeerError, match=r"^engine 1 .* is gone"):
        near.check_alive()
    with pytest.raises(PeerError, match=r"^engine 1 .* is gone"):
        near.receive(1.0)
    with pytest.raises(PeerError, match=r"^engine 1 .* is gone"):
        for _ in range(100):  # the first ones may still be taken by the system
            near.send(Failed("x" * 10000))


def test_what_a_peer_said_before_its_end_is_read_first(ends: tuple[Channel, socket.socket]) -> None:
    near, far = ends
    Channel(far, LEARNER, 5.0).send(Failed("last words"))
    far.close()
    near.check_alive()
    assert near.receive(5.0) == Failed("last words")


def test_a_lost_machine_is_noticed_by_the_system(ends: tuple[Channel, socket.socket]) -> None:
    near = ends[0]._socket
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, every, times = (
        near.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
    )
    assert idle + every * times == 120  # seconds


class Accepting:
    """The learner's half of joining, in a thread."""

    def __init__(self, engines: int, start_timeout_s: float, host: str = "127.0.0.1") -> None:
        self.store = dist.HashStore()
        self.found: dict[int, Channel] = {}
        self.error: Exception | None = None
        arguments = (self.store, host, engines + 1, 5.0, start_timeout_s)
        self.thread = threading.Thread(target=self._run, args=arguments)
        self.thread.start()

    def _run(self, *arguments: object) -> None:
        try:
            self.found = world._accept(*arguments)  # type: ignore[arg-type]
        except PeerError as error:
            self.error = error

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.store.get(world.ADDRESS_KEY).split()[0])


def test_strangers_are_sent_away_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "TOKEN_TIMEOUT_S", 0.2)
    learner = Accepting(engines=2, start_timeout_s=20.0)
    for words in (b"", b"short", b"x" * 32, struct.pack("<QQ", 2**62, 2**62) + b"y" * 100):
        with socket.create_connection(learner.address(), 5.0) as stranger:
            stranger.sendall(words)
            stranger.settimeout(5.0)
            with suppress(ConnectionResetError):  # it was closed with words unread
                assert stranger.recv(1) == b""
    engines = [Peer(rank, f"engine {rank}", "here", 100 + rank) for rank in (2, 1)]
    channels = [world._connect(learner.store, "127.0.0.1", engine, 5.0) for engine in engines]
    learner.thread.join()
    assert {rank: channel.peer for rank, channel in learner.found.items()} == {2: engines[0], 1: engines[1]}
    learner.found[1].send(Welcome(engines))
    assert channels[1].receive(5.0) == Welcome(engines)
    for channel in (*channels, *learner.found.values()):
        channel.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_the_newer_protocol_serves_as_well() -> None:
    learner = Accepting(engines=1, start_timeout_s=20.0, host="::1")
    channel = world._connect(learner.store, "::1", Peer(1, "engine 1", "here", 101), 5.0)
    learner.thread.join()
    assert learner.found[1].peer.pid == 101
    channel.close()
    learner.found[1].close()


@pytest.mark.parametrize(
    ("address", "machines", "refused"),
    [
        ("127.0.1.1", ["one", "one", "two"], True),
        ("::1", ["one", "two", "two"], True),
        ("127.0.1.1", ["one", "one", "one"], False),  # two starts on one machine
        ("10.0.0.1", ["one", "one", "two"], False),
    ],
)
def test_an_address_that_others_do_not_reach_is_refused_by_all(
    address: str, machines: list[str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner would wait for ten minutes for who cannot come."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [(0, 0, 0, "", (address, port))])
    store, heard = dist.HashStore(), []

    def check(rank: int) -> None:
        try:
            world._check_reachable(store, "node-one", Peer(rank, "it", machines[rank], 1), 3)
        except HardwareError as error:
            heard.append(str(error))

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(heard) == (3 if refused else 0) and len(set(heard)) == refused
    if refused:
        assert heard[0].startswith(f"MASTER_ADDR=node-one is {address} on one, which rank 2 on two does not reach; ")


def test_an_engine_that_does_not_come_is_named() -> None:
    learner = Accepting(engines=2, start_timeout_s=1.0)
    channel = world._connect(learner.store, "127.0.0.1", Peer(1, "engine 1", "here", 101), 5.0)
    learner.thread.join()
    channel.close()
    assert isinstance(learner.error, PeerError)
    assert str(learner.error).startswith("engine 2 (rank 2, process 0 on an unknown host) did not come within 1 s; ")


def test_a_learner_that_does_not_listen_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    store = dist.HashStore()
    store.set(world.ADDRESS_KEY, f"{free} token")
    with pytest.raises(PeerError, match=r"^learner \(rank 0, process 0 on 127.0.0.1\) cannot be reached \(.*refused"):
        world._connect(store, "127.0.0.1", ENGINE, 5.0)


@pytest.mark.parametrize(("value", "expected"), [(None, 1), ("3", 3)])
def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: int) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if value:
        monkeypatch.setenv("WORLD_SIZE", value)
    assert world.started_processes() == expected


# --- what a launcher says --------------------------------------------------------------------------------------------

TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2: processes are numbered from 0 to 1; correct what"),
        ({"RANK": "-1"}, "RANK=-1 is not below WORLD_SIZE=2"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=1"),
        ({"MASTER_ADDR": "node.invalid"}, "MASTER_ADDR=node.invalid is no address that this machine can resolve"),
        ({"MASTER_ADDR": "x" * 300}, "is no address that this machine can resolve"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=2 starts several processes, and MASTER_ADDR is not set; start them with"),
    ],
)
def test_a_launch_that_cannot_meet_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], message: str
) -> None:
    for name, value in {**TWO, "MASTER_ADDR": "127.0.0.1", **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HardwareError, match=re.escape(message)):
        world.join(CpuPlatform(), 5.0)


def test_a_launch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TWO, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK")
    assert world._check_launch() == (1, 2, 1)
