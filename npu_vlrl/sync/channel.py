"""Messages between the learner and one engine process: a word, JSON values and raw bytes, over a socket.

A socket says at once that the other process is gone, takes a deadline for every wait, and moves nothing but bytes:
nothing is unpickled. (A receive of gloo that times out breaks every connection of its process group.)
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LENGTHS = struct.Struct("<QQ")
"""Bytes of the JSON header, and number of blobs; the header holds the length of each blob."""

LARGEST_HEADER = 2**30

KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Seconds, seconds and a count: a machine that is lost says nothing, and is given up after two minutes."""


@dataclass(frozen=True)
class Peer:
    """A process of the training. Rank 0 is the learner, every other one an engine.

    Example: `Peer(1, "engine 1", "node7", 4711)`
    """

    rank: int
    name: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, process {self.pid} on {self.host})"


class PeerError(RuntimeError):
    """Another process of the training is gone, or did not answer in time; the message names it."""

    def __init__(self, peer: Peer, what: str) -> None:
        super().__init__(
            f"{peer} {what}; its own output says why. Start the training again with run.if_exists=resume to go on "
            "from the last checkpoint"
        )
        self.peer = peer


@dataclass(frozen=True)
class Message:
    """Example: `Message("generate", {"round": 3}, (pixels,))`"""

    kind: str
    content: dict[str, Any] = field(default_factory=dict)
    blobs: tuple[bytes, ...] = ()


class Channel:
    """One end of a connection. `send` may be called from one thread at a time, and so may `receive`."""

    def __init__(self, connection: socket.socket, peer: Peer, timeout_s: float) -> None:
        """`timeout_s` bounds every single wait inside a message; how long to wait for one is told to `receive`."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.settimeout(timeout_s)
        self._socket = connection
        self.peer = peer
        self.timeout_s = timeout_s

    def send(self, kind: str, content: dict[str, Any] | None = None, blobs: Sequence[bytes] = ()) -> None:
        """Raises PeerError when the other process is gone or takes nothing for `timeout_s` seconds."""
        sizes = [len(memoryview(blob).cast("B")) for blob in blobs]
        header = json.dumps([kind, content or {}, sizes], allow_nan=False).encode()
        try:
            self._socket.sendall(LENGTHS.pack(len(header), len(blobs)) + header)
            for blob in blobs:
                self._socket.sendall(blob)
        except TimeoutError:
            raise PeerError(self.peer, f"took no data for {self.timeout_s:g} s") from None
        except OSError as error:
            raise PeerError(self.peer, f"is gone ({error})") from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message; without `timeout_s` it waits as long as the other process lives.

        Raises PeerError when that process is gone, or no message begins within `timeout_s` seconds.
        """
        if not self.waiting(timeout_s):
            raise PeerError(self.peer, f"did not answer within {timeout_s:g} s")
        header_size, n_blobs = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if header_size > LARGEST_HEADER:
            raise PeerError(self.peer, f"sent a header of {header_size} bytes, which no message has")
        kind, content, sizes = json.loads(self._exactly(header_size))
        assert len(sizes) == n_blobs
        return Message(kind, content, tuple(self._exactly(size) for size in sizes))

    def waiting(self, timeout_s: float | None = 0.0) -> bool:
        """Whether a message (or the end of the other process) is there within `timeout_s` seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def check_alive(self) -> None:
        """Raises PeerError when the other process has ended; a message that waits is left where it is."""
        if self.waiting():
            try:
                ended = not self._socket.recv(1, socket.MSG_PEEK)
            except OSError:
                ended = True
            if ended:
                raise PeerError(self.peer, "is gone")

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                read = self._socket.recv_into(view)
            except TimeoutError:
                raise PeerError(self.peer, f"stopped in the middle of a message for {self.timeout_s:g} s") from None
            except OSError as error:
                raise PeerError(self.peer, f"is gone ({error})") from error
            if not read:
                raise PeerError(self.peer, "is gone")
            view = view[read:]
        return bytes(data)
