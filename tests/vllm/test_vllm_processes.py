"""vLLM in a process of its own, whose workers share the model: real processes, real collectives, no weights beside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.models import tiny_folder
from tests.support.ranks import finish, said, start
from tests.support.scoring import TOLERANCE
from tests.support.vllm_stage import HIDDEN
from tests.vllm.test_vllm_engine import VISIBLE


@pytest.mark.parametrize("workers", [2])
def test_workers_sample_with_the_weights_of_another_process(tmp_path: Path, workers: int) -> None:
    """Images of before the update, and a tower that changes with it."""
    folder = shutil.copytree(tiny_folder("qwen2_5_vl", HIDDEN), tmp_path / "model")
    processes = start(2, ["-m", "tests.vllm.actor", folder, workers], tmp_path)
    assert finish(processes) == [0, 0], said(tmp_path, 2)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [seen[step][1] for step in ("first", "not told", "told", "again")] == [[0], [0], [1], [2]]
    assert max(seen[step][0] for step in ("first", "told", "again")) < TOLERANCE
    assert seen["not told"][0] > VISIBLE
    assert seen["bytes"] <= seen["sync"]["sync/bytes"] < 1.2 * seen["bytes"]
