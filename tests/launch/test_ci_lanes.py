"""GitHub's workflow runs the lanes of .ci/run, all of them, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
RUN = (ROOT / ".ci" / "run").read_text()


def lanes() -> list[str]:
    found = re.search(r"^lanes=\((.*)\)$", RUN, re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_the_workflow_runs_every_lane() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["lane"]
    assert job["strategy"]["matrix"]["lane"] == lanes()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["bash .ci/run ${{ matrix.lane }}"]


def test_a_lane_is_a_function_of_parts() -> None:
    assert len(lanes()) == 3
    assert sorted(lanes()) == sorted(re.findall(r"^(\w+)\(\) \{\n    part ", RUN, re.MULTILINE))
    everything = RUN.partition("\nelse\n")[2].partition("\nfi\n")[0]
    assert everything.split() == ["cpu", "side_by_side", "npu_path", "other_builds"]


def test_a_wrong_lane_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / ".venv").mkdir()
    done = subprocess.run(["bash", tmp_path / ".ci" / "run", "gpu"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, ".ci/run: gpu is not a lane; they are: cpu npu_path other_builds\n")
    assert (tmp_path / ".venv").is_dir()
