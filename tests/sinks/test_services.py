"""The real packages, each in processes of its own, offline: what they keep is read with their own tools."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image as Pillow
from wandb.proto.wandb_internal_pb2 import Record

ROOT = Path(__file__).parents[2]
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "SWANLAB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "DO_NOT_TRACK": "1",
}
CONFIG = {"optim": {"lr": 1e-3, "betas": [0.9, 0.95]}, "critic": None}
STEPS = {step: {"train/reward": step / 4, "eval/all/accuracy": 0.5} for step in range(4)}


def run(name: str, folder: Path, first: int, *fail: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.opening", name, str(folder), str(first), *fail]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"TRACKIO_DIR": str(folder.parent / "trackio"), "HOME": str(folder.parent), "PYTHONPATH": path}
    done = subprocess.run(command, env={**os.environ, **OFFLINE, **own}, capture_output=True, text=True, check=False)
    assert "run.sinks" not in done.stdout, done.stdout  # nothing was told of
    return done


def stopped_and_resumed(name: str, folder: Path) -> None:
    failed = run(name, folder, 0, "fail")
    assert failed.returncode == 1 and "the machine burnt" in failed.stderr, failed.stderr
    done = run(name, folder, 2)
    assert done.returncode == 0, done.stderr


def shades(files: Iterator[Path]) -> set[int]:
    """Of images in one shade of grey."""
    found = set()
    for file in files:
        with Pillow.open(file) as image:
            pixels = np.array(image.convert("RGB"))
        assert pixels.shape == (6, 8, 3) and (pixels == pixels[0, 0, 0]).all()
        found.add(int(pixels[0, 0, 0]))
    return found


ALL_SHADES = {0, 1, 2, 3, 100, 101, 102, 103}


def test_wandb(tmp_path: Path) -> None:
    folder = tmp_path / "arrow_tiny"
    stopped_and_resumed("wandb", folder)
    [identity] = json.loads((folder / "sinks.json").read_text()).values()
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    history: dict[int, dict[str, Any]] = {}
    captions, codes, config, error = set(), [], {}, None
    for file in files:
        for record in records(file):
            for item in record.run.config.update:
                config[item.key] = json.loads(item.value_json)
            values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            captions |= set(values.get("trajectory/captions", ()))
            if record.HasField("history"):
                history.setdefault(int(values["_step"]), {}).update({k: values[k] for k in STEPS[0] if k in values})
            for item in record.summary.update:
                if (item.key or item.nested_key[0]) == "error":
                    error = json.loads(item.value_json)
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
    assert history == STEPS and codes == [1, 0]
    assert error == "RuntimeError: the machine burnt"
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert captions == {f"'up', right answer 'up', reward {shade}, solved" for shade in ALL_SHADES}
    assert shades(folder.glob("wandb/**/*.png")) == ALL_SHADES


def records(file: Path) -> Iterator[Record]:
    """A log as LevelDB writes it: blocks of 32 KiB, pieces of records with checksum, length and kind before them."""
    data, position, piece = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # no room for another piece
            position += 32768 - position % 32768
        length, kind = struct.unpack_from("<4xHB", data, position)
        piece += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(piece)
            yield record
            piece = b""


def test_swanlab(tmp_path: Path) -> None:
    folder = tmp_path / "arrow_tiny"
    stopped_and_resumed("swanlab", folder)
    [identity] = json.loads((folder / "sinks.json").read_text()).values()
    runs = sorted((folder / "swanlab").rglob("run-*.swanlab"))
    assert [file.name for file in runs] == [f"run-{identity}.swanlab"] * 2
    for file in runs:
        config = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())
        assert config["optim"]["value"] == CONFIG["optim"] and "critic" in config  # it writes {} for nothing
    kept = b"".join(file.read_bytes() for file in runs)
    for word in ("train/reward", "eval/all/accuracy", "right answer 'up', reward 103, solved", "the machine burnt"):
        assert word.encode() in kept, word
    assert b"train/kl" not in kept
    assert shades((folder / "swanlab").rglob("*.png")) == ALL_SHADES


def test_trackio(tmp_path: Path) -> None:
    folder = tmp_path / "arrow_tiny"
    stopped_and_resumed("trackio", folder)
    [identity] = json.loads((folder / "sinks.json").read_text()).values()
    with sqlite3.connect(tmp_path / "trackio" / "npu_vlrl.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        configs = database.execute("select config from configs").fetchall()
        alerts = database.execute("select title, text from alerts").fetchall()
    assert {name for name, *_ in rows} == {f"arrow_tiny-{identity[:8]}"}
    history: dict[int, dict[str, Any]] = {}
    captions = set()
    for _, step, text in rows:
        for key, value in json.loads(text).items():
            if isinstance(value, dict):
                captions.add(value["caption"])
            else:
                history.setdefault(step, {})[key] = value
    assert history == STEPS
    assert captions == {f"'up', right answer 'up', reward {shade}, solved" for shade in ALL_SHADES}
    assert {key: json.loads(configs[0][0])[key] for key in CONFIG} == CONFIG
    assert alerts == [("the run failed", "RuntimeError: the machine burnt")]
    assert shades((tmp_path / "trackio").rglob("*.png")) == ALL_SHADES


@pytest.mark.parametrize(("name", "variable"), [("wandb", "WANDB_MODE"), ("swanlab", "SWANLAB_MODE")])
def test_a_service_that_nobody_logged_in_to_is_refused_at_the_start(
    tmp_path: Path, name: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OFFLINE, variable, "online")
    done = run(name, tmp_path / "run", 0)
    assert done.returncode == 1 and f"ConfigError: run.sinks: {name} cannot begin: " in done.stderr
