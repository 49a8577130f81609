"""Run folders written by hand, as an older or newer version may have left them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {"model": {"path": "tiny:qwen2_5_vl"}, "data": {"train": {"generator": "arrow"}}}


def run_folder(
    folder: Path,
    lines: Sequence[Mapping[str, Any]] = (),
    trajectories: Sequence[Mapping[str, Any]] = (),
    **sections: Mapping[str, Any],
) -> Path:
    """`sections` of the configuration, e.g. `train={"seed": 1}`."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(BASE | sections))  # JSON is YAML
    for name, records in (("metrics", lines), ("trajectories", trajectories)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
