"""Typed messages between the learner and one engine process, over a socket.

A socket reports at once that the other process is gone, has a deadline for every wait, and moves only bytes: nothing is
unpickled. (A receive of gloo that times out breaks every connection of its process group.)
"""

from __future__ import annotations

import select
import socket
import struct
from typing import TypeVar

import msgspec

from npu_vlrl.network.messages import Failed, Message, Peer, Stop, kind_of

M = TypeVar("M", bound=Message)

LENGTHS = struct.Struct("<HQ")
"""Header of a message: the lengths of its name and of its body, in bytes."""

LONGEST_NAME, LARGEST = 64, 2**40
"""Upper bounds of both lengths, in bytes."""

KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Keep-alive options in seconds, seconds and a count: a lost machine sends nothing, and is given up after two minutes.
"""


class PeerError(RuntimeError):
    """Another process of the training is gone, or did not answer in time; the message names it."""

    def __init__(self, peer: Peer, what: str) -> None:
        super().__init__(
            f"{peer} {what}; its own output says why. Start the training again with run.if_exists=resume to go on "
            "from the last checkpoint"
        )
        self.peer = peer


class Channel:
    """One end of a connection. `send` may be called from one thread at a time, and so may `receive`."""

    def __init__(self, connection: socket.socket, peer: Peer, timeout_s: float) -> None:
        """`timeout_s` bounds every single wait inside a message; `receive` has its own limit for the wait for one."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.settimeout(timeout_s)
        self._socket = connection
        self.peer = peer
        self.timeout_s = timeout_s

    def send(self, message: Message) -> None:
        """Sends a message. Raises PeerError when the other process is gone or takes nothing for `timeout_s` seconds."""
        name, body = type(message).__name__.encode(), msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(LENGTHS.pack(len(name), len(body)) + name)
            self._socket.sendall(body)
        except TimeoutError:
            raise PeerError(self.peer, f"took no data for {self.timeout_s:g} s") from None
        except OSError as error:
            raise PeerError(self.peer, f"is gone ({error})") from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """Receives the next message; without `timeout_s` it waits as long as the other process lives.

        Raises PeerError when that process is gone, no message begins within `timeout_s` seconds, or the message is of
        an unknown kind or has other fields than declared.
        """
        if not self.waiting(timeout_s):
            raise PeerError(self.peer, f"did not answer within {timeout_s:g} s")
        name_size, size = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if name_size > LONGEST_NAME or size > LARGEST:
            raise PeerError(self.peer, f"sent a message of {size} bytes, which none has")
        name = self._exactly(name_size).decode(errors="replace")
        kind = kind_of(name)
        if kind is None:
            raise PeerError(self.peer, f"sent {name!r}, which is no message here; run one release on all machines")
        try:
            return msgspec.msgpack.decode(self._exactly(size), type=kind)
        except msgspec.DecodeError as error:
            raise PeerError(self.peer, f"sent a malformed {name} ({error}); run one release on all machines") from error

    def expect(self, kind: type[M], timeout_s: float | None, failed: type[RuntimeError]) -> M:
        """Receives the next message, which must be of this kind. Raises the errors of `receive`, `failed` with the
        reason where the other process has failed, and PeerError where it stops this one instead.
        """
        message = self.receive(timeout_s)
        if isinstance(message, Failed):
            raise failed(f"{self.peer}: {message.reason}")
        if isinstance(message, Stop):
            raise PeerError(self.peer, "gave up in the middle of the work")
        assert isinstance(message, kind), f"{self.peer} sent {type(message).__name__} instead of {kind.__name__}"
        return message

    def waiting(self, timeout_s: float | None = 0.0) -> bool:
        """Whether a message (or the end of the other process) arrives within `timeout_s` seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def check_alive(self) -> None:
        """Raises PeerError when the other process has ended; does not read a message that has arrived."""
        if self.waiting():
            try:
                ended = not self._socket.recv(1, socket.MSG_PEEK)
            except OSError:
                ended = True
            if ended:
                raise PeerError(self.peer, "is gone")

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
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
        return data
