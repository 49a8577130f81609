"""The JSON lines of a run folder, while a run may be writing them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npu_vlrl.config import ConfigError


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines; none where there is no file. A last line that was cut is left out."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # it is being written, or a crash cut it
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{file}: line {number} is no JSON ({error}); mend or remove it") from error
