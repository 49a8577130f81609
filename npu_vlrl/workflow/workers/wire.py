"""Messages between the program and its workers: one frame of JSON, then a frame of RGB pixels for each image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from npu_vlrl.types import Image

Content = dict[str, Any]


def send(connection: Connection, content: Mapping[str, Any], images: Sequence[Image] = ()) -> None:
    """`content` must be JSON. Blocks while the other end does not read; raises OSError when it is gone."""
    header = {"content": content, "sizes": [image.size for image in images]}
    connection.send_bytes(json.dumps(header).encode())
    for image in images:
        connection.send_bytes(image.rgb.tobytes())


def receive(connection: Connection) -> tuple[Content, tuple[Image, ...]]:
    """Raises EOFError when the other end closed."""
    header = json.loads(connection.recv_bytes())
    return header["content"], tuple(_image(size, connection.recv_bytes()) for size in header["sizes"])


def json_part(values: Mapping[str, Any]) -> Content:
    """The entries that can be written as JSON."""
    return {key: value for key, value in values.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _image(size: Sequence[int], pixels: bytes) -> Image:
    width, height = size
    return Image(np.frombuffer(pixels, np.uint8).reshape(height, width, 3))
