"""The processes of one training, as torchrun started them: the learner, and the engines that sample for it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from npu_vlrl.hardware import Platform
from npu_vlrl.sync.channel import Channel, Peer, PeerError

__all__ = ["Channel", "Peer", "PeerError", "World", "join", "started_processes"]

LEARNER = 0
ADDRESS_KEY = "npu_vlrl/address"


def started_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class World:
    """This process's place among the others. Rank 0 is the learner; it has a channel to every engine, and each engine
    has one to it. Weights go through torch.distributed, whose default group spans all of them.
    """

    def __init__(
        self, platform: Platform, rank: int, peers: Sequence[Peer], channels: dict[int, Channel], timeout_s: float
    ) -> None:
        self._platform = platform
        self.rank = rank
        self.peers = tuple(peers)
        self.timeout_s = timeout_s
        self._channels = channels

    @property
    def size(self) -> int:
        return len(self.peers)

    def channel(self, rank: int) -> Channel:
        return self._channels[rank]

    def enter_thread(self) -> None:
        """A new thread begins with device 0; this gives it the process's own."""
        self._platform.set_device(int(os.environ["LOCAL_RANK"]))

    def close(self) -> None:
        """Ends the connections. The process group is left to the end of the process: to destroy it waits for others."""
        for channel in self._channels.values():
            channel.close()


def join(platform: Platform, timeout_s: float) -> World:
    """Joins the other processes; each takes the device of its local rank. All processes call it at the same time.

    Raises HardwareError without that device, and PeerError when another process does not come within `timeout_s`.
    """
    rank, size = int(os.environ["RANK"]), started_processes()
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    platform.set_device(local_rank)
    dist.init_process_group(platform.process_group_backend, timeout=timedelta(seconds=timeout_s))
    store = dist.distributed_c10d._get_default_store()
    host = "127.0.0.1" if local_size == size else os.environ["MASTER_ADDR"]
    me = Peer(rank, f"engine {rank}" if rank else "learner", socket.gethostname(), os.getpid())
    if rank == LEARNER:
        return _accept(platform, store, host, me, size, timeout_s)
    address = store.get(ADDRESS_KEY).decode()
    port, token = address.split()
    learner = Peer(LEARNER, "learner", host, 0)
    try:
        connection = socket.create_connection((host, int(port)), timeout_s)
    except OSError as error:
        raise PeerError(learner, f"does not listen on port {port} ({error})") from error
    channel = Channel(connection, learner, timeout_s)
    channel.send("hello", {"token": token, "peer": [me.rank, me.name, me.host, me.pid]})
    peers = [Peer(*values) for values in channel.receive(timeout_s).content["peers"]]
    channel.peer = peers[LEARNER]
    return World(platform, rank, peers, {LEARNER: channel}, timeout_s)


def _accept(platform: Platform, store: dist.Store, host: str, me: Peer, size: int, timeout_s: float) -> World:
    """The learner listens, on loopback unless engines are on other machines; a stranger does not know the token."""
    token = secrets.token_hex(16)
    channels: dict[int, Channel] = {}
    with socket.create_server((host, 0), backlog=size) as server:
        server.settimeout(timeout_s)
        store.set(ADDRESS_KEY, f"{server.getsockname()[1]} {token}")
        while len(channels) < size - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                absent = next(rank for rank in range(1, size) if rank not in channels)
                unseen = Peer(absent, f"engine {absent}", "an unknown host", 0)
                raise PeerError(unseen, f"did not come within {timeout_s:g} s") from None
            channel = Channel(connection, Peer(-1, "a new process", "an unknown host", 0), timeout_s)
            peer = _introduced(channel, token)
            if peer is None:
                channel.close()
                continue
            channel.peer = peer
            channels[peer.rank] = channel
    peers = [me, *(channels[rank].peer for rank in range(1, size))]
    for channel in channels.values():
        channel.send("welcome", {"peers": [[p.rank, p.name, p.host, p.pid] for p in peers]})
    return World(platform, LEARNER, peers, channels, timeout_s)


def _introduced(channel: Channel, token: str) -> Peer | None:
    """Who connected; None for anything but a process of this training."""
    try:
        hello = channel.receive(channel.timeout_s)
    except (PeerError, ValueError):
        return None
    if hello.kind != "hello" or not hmac.compare_digest(str(hello.content.get("token")), token):
        return None
    return Peer(*hello.content["peer"])
