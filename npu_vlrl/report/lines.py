"""Reads the JSON lines of a run folder, also while a run is writing them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from npu_vlrl.config import ConfigError


def read_lines(file: Path, read: Callable[[bytes], dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
    """Reads the records of a file of JSON lines; none without a file. An incomplete last line is left out.

    `read` makes a record of a line, and raises ValueError for an invalid line; by default any object is a record.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # it is being written, or a crash cut it
            try:
                yield (read or _read_object)(line)
            except ValueError as error:
                raise ConfigError(f"{file}: line {number} is no record ({error}); mend or remove it") from error


def _read_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"an object is expected, got {type(value).__name__}")
    return value
