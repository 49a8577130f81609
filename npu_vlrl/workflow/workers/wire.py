"""Messages between the program and its workers: one frame of JSON, then a frame of RGB pixels for each image."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from npu_vlrl.types import Image

Content = dict[str, Any]

MAX_JSON = 2**28
"""Maximum size of a message's JSON, in bytes; a longer one was not written by `send`."""

MAX_PIXELS = 2**28
"""Maximum size of an image, in bytes; tools have a lower limit (`data.images.check_size`)."""


class WireError(RuntimeError):
    """Raised when the received bytes are no message: another process writes to the same socket."""


class Received(NamedTuple):
    """A received message with its sender."""

    content: Content
    images: tuple[Image, ...]
    number: int
    """Number of the request; a reply repeats it."""
    pid: int
    """Process id of the sender."""


def send(connection: Connection, content: Mapping[str, Any], images: Sequence[Image] = (), number: int = 0) -> None:
    """Sends `content`, which must be JSON. Blocks while the other end does not read; raises OSError when it is gone."""
    sizes = [image.size for image in images]
    header = {"content": content, "sizes": sizes, "number": number, "pid": os.getpid()}
    connection.send_bytes(json.dumps(header).encode())
    for image in images:
        connection.send_bytes(image.rgb.tobytes())


def receive(connection: Connection) -> Received:
    """Receives one message. Raises EOFError when the other end closed, and WireError for anything but a message."""
    header = _frame(connection, MAX_JSON)
    try:
        fields = json.loads(header)
        content, number, pid = fields["content"], fields["number"], fields["pid"]
        sizes = [(int(width), int(height)) for width, height in fields["sizes"]]
        images = tuple(_image(size, _frame(connection, MAX_PIXELS)) for size in sizes)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"{header[:80]!r} is no message") from error
    if not isinstance(content, dict):
        raise WireError(f"{header[:80]!r} is no message")
    return Received(content, images, number, pid)


def json_part(values: Mapping[str, Any]) -> Content:
    """Entries of `values` that can be written as JSON."""
    return {key: value for key, value in values.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _frame(connection: Connection, limit: int) -> bytes:
    try:
        return connection.recv_bytes(limit)
    except OSError as error:
        if error.errno is None:  # the frame's length is impossible; a broken socket has a number
            raise WireError("the length of a frame is impossible") from error
        raise


def _image(size: tuple[int, int], pixels: bytes) -> Image:
    width, height = size
    return Image(np.frombuffer(pixels, np.uint8).reshape(height, width, 3))
