"""The program as a user starts it, in this process, on runs of seconds."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from npu_vlrl.cli import main
from npu_vlrl.tasks.geo3k.data import SCHEMA

SMALL = (
    "train.steps=1",
    "rollout.groups=2",
    "rollout.group_size=2",
    "workflow.turn_tokens=4",
    "workflow.max_turns=1",
    "evaluation.tasks=2",
    "reward.rule=tagged",
)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    def refused(self) -> str:
        """The one message of a program that never started to work."""
        assert self.code == 2, self
        assert self.out == "" and self.err.startswith("npu-vlrl: ") and "Traceback" not in self.err
        return self.err.removeprefix("npu-vlrl: ").rstrip("\n")


def program(*arguments: object) -> Outcome:
    """Runs a command; any exception but argparse's exit is a failure of the test."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return Outcome(code, out.getvalue(), err.getvalue())


def config_file(folder: Path, **values: Any) -> Path:
    """A configuration of a tiny model with the given sections."""
    path = folder / "config.yaml"
    path.write_text(json.dumps({"model": {"path": "tiny:qwen2_5_vl"}, **values}))  # JSON is YAML
    return path


def png(side: int = 28, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A good row in verl's schema; `changes` replace whole fields."""
    return {
        "data_source": "made",
        "prompt": [{"role": "user", "content": "<image>Which way?"}],
        "images": [{"bytes": png(seed=number), "path": None}],
        "ability": "test",
        "reward_model": {"style": "rule", "ground_truth": "up"},
        "extra_info": {"id": str(number)},
        **changes,
    }


def parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), path)
    return path


def records(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").split("\n")[:-1]]
