"""Base of the typed messages between the processes of a training, and messages by which processes start and end.

A room that sends messages of its own declares them as subclasses of `Message`. Each is one MessagePack value: raw bytes
stay raw bytes, floats keep every bit, and a field of another type than declared is refused by the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


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


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message; its class is its kind, which the receiver finds by its name."""


def kind_of(name: str) -> type[Message] | None:
    """The message class of this name, among those that this process has imported."""
    return next((kind for kind in Message.__subclasses__() if kind.__name__ == name), None)


class Hello(Message):
    """The first message of a process that connects to rank 0."""

    peer: Peer


class Welcome(Message):
    """The answer of rank 0, once all processes have connected."""

    peers: list[Peer]
    """All processes, by rank."""


class Begin(Message):
    """Lets a process load its model."""

    scratch: str
    """Folder that has a `tiny:` model, or where it may be written."""


class Ready(Message):
    """A process has loaded its model."""


class Failed(Message):
    """A process failed and waits for `Stop`."""

    reason: str


class Stop(Message):
    """Ends a process."""
