"""NPUs under Ray: each process has one of those that are visible on the host, by its number there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.host_cann import children, environment
from tests.support.ranks import ROOT

TEXT = """
import json, os
from npu_vlrl.cluster.placement import bundles, connected, reserved
from npu_vlrl.config import load_config
from npu_vlrl.hardware import select

CHILD = '''
import os
import torch
from npu_vlrl.hardware import select
platform = select()
platform.set_device(0)
total = torch.ones(3, device=platform.device()).sum().item()
print("OWN", platform.device_count(), platform.physical_id(0), total, os.nice(0))
'''


def look(actor, text):
    import subprocess, sys
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.startswith("OWN")] or [done.stderr]


config, platform = load_config(os.environ["CONFIG"], ["ray.processes=2"]), select()
assert platform.device_count() == 2
with connected(config, platform) as ray, reserved(ray, bundles(config, platform), platform) as places:
    print(json.dumps({"devices": [place.devices for place in places]}))
    for place in places:
        print(json.dumps(ray.get(place.actor.__ray_call__.remote(look, CHILD))))
"""

HOST = {"ASCEND_RT_VISIBLE_DEVICES": "4,5", "HOST_CANN_DEVICES": "8", "NPU_VLRL_PLATFORM": "npu"}


def small(folder: Path) -> str:
    file = folder / "small.yaml"
    file.write_text(
        "model: {path: 'tiny:qwen2_5_vl'}\n"
        "data: {train: {generator: arrow}}\n"
        "train: {steps: 2, threads: 1}\n"
        "workflow: {max_turns: 1, turn_tokens: 8}\n"
        "rollout: {groups: 2, group_size: 2}\n"
        "evaluation: {tasks: 2}\n"
    )
    return str(file)


def test_two_processes_each_see_one_of_the_visible_npus(tmp_path: Path) -> None:
    (ended,) = children.run(TEXT, CONFIG=small(tmp_path), **HOST)
    assert ended.code == 0, ended.output
    assert '{"devices": ["4", "5"]}' in ended.output, ended.output
    own = [json.loads(line)[0] for line in ended.output.splitlines() if line.startswith("[")]
    assert own == [
        "OWN 1 4 3.0 0",
        "OWN 1 5 3.0 0",
    ]  # NPUs, the number on the host, a sum there, and the niceness, ended.output


def test_learner_and_engine_train_on_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "npu_vlrl", "train", "--config", small(tmp_path), "ray.processes=2"]
    ended = subprocess.run(
        [*command, f"run.dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env={**os.environ, **environment(), **HOST, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ") has rank 0, 1 on NPU 4, 5\n" in ended.stderr
    assert re.search(r"^npu: 1 x ", ended.stdout, re.MULTILINE), ended.stdout  # Gloo of torch 2.10 says something first
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    assert len(steps) == 2 and all(step["sync/bytes"] > 0 and step["logprob_gap"] < 1e-4 for step in steps)
