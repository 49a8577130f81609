"""A launcher ends an engine process by SIGTERM: what it made for itself goes with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.program import config_file
from tests.support.ranks import PATIENCE_S, ROOT

ENGINE = """
import sys, tempfile, time
from pathlib import Path
from types import SimpleNamespace
from npu_vlrl.training import processes
from npu_vlrl.config import load_config

def local_engine(config, platform, outline, vision, placement, cleanup):
    folder = tempfile.TemporaryDirectory(dir=sys.argv[2])
    cleanup.callback(folder.cleanup)
    return folder

def serve(world, load):
    held = load(Path(sys.argv[2]))  # as a vLLM holds its adapter's folder
    print("ready", flush=True)
    time.sleep(100)

processes.prepare = processes.learning_ranks = processes.load_model = lambda *_: None
processes.join = lambda *_, **__: SimpleNamespace(rank=1, learners=range(1))
processes.local_engine, processes.serve = local_engine, serve
processes.run_engine(load_config(sys.argv[1], ["rollout.engine=vllm"]))
"""


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    config = config_file(tmp_path, data={"train": {"generator": "arrow"}})
    room = tmp_path / "room"
    room.mkdir()
    words = [sys.executable, "-c", ENGINE, config, str(room)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n" and len(list(room.iterdir())) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert list(room.iterdir()) == []
