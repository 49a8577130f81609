"""What a run leaves behind is read by another release of transformers: models, checkpoints and exports, both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from npu_vlrl.hardware import software
from tests.releases.conftest import PYTHON
from tests.releases.trainings import CASES

PATIENCE_S = 600
"""Each of four processes takes about 15 s on a free core. The time of the fixture counts as that of the first test."""

pytestmark = pytest.mark.timeout(4 * PATIENCE_S)

REPOSITORY = Path(__file__).parents[2]
TOLERANCE = 2e-5
"""Nats, float32."""
AFTER_AN_UPDATE = 1e-3
"""Adam divides by the root of what it has seen, which makes much of the last bits of small gradients."""


class Side:
    """What one release wrote, and what the other made of it."""

    def __init__(self, root: Path, writer: str, reader: str) -> None:
        self._root, self._out = root, root / "read"
        self._out.mkdir(parents=True)
        run(writer, "write", root)
        run(reader, "read", root, self._out)
        self.releases = tuple((folder / "release").read_text() for folder in (root, self._out))

    def values(self, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        written, read = (load_file(folder / f"{name}.safetensors") for folder in (self._root, self._out))
        return written, read


def run(python: str, *arguments: str | Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # `import torch` would look for CANN where torch_npu is
    }
    subprocess.run(
        [python, "-m", "tests.releases.trainings", *arguments],
        env=environment, cwd=REPOSITORY, check=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["here", "there"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Side:
    """Written here and read there, or the other way round."""
    pythons = (sys.executable, os.environ[PYTHON])
    return Side(
        tmp_path_factory.mktemp(request.param) / "runs", *(pythons if request.param == "here" else pythons[::-1])
    )


def test_the_releases_differ(side: Side) -> None:
    assert len(set(side.releases)) == 2 and software.version("transformers") in side.releases


@pytest.mark.parametrize("name", CASES)
def test_the_other_release_gives_the_same_logprobs(side: Side, name: str) -> None:
    written, read = side.values(name)
    assert written.keys() == read.keys() == {"model", "checkpoint", "export", "third"}
    for what in ("model", "checkpoint", "export"):
        assert (written[what] - read[what]).abs().max() < TOLERANCE, what
    assert (written["third"] - read["third"]).abs().max() < AFTER_AN_UPDATE


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_seen(side: Side, name: str) -> None:
    """The checks above can fail."""
    written, _ = side.values(name)
    for before, after in (("model", "checkpoint"), ("checkpoint", "third")):
        assert (written[before] - written[after]).abs().max() > 10 * AFTER_AN_UPDATE
