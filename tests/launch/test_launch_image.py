"""Step image of launch/install_npu.sh with the real pip: an environment that stands for a container image's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.checkout import Checkout, Ran
from tests.launch.test_launch_requirements import wheel

PIP = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "index", "PIP_CONFIG_FILE": "/dev/null"}
PINS = "torch==2.10.0\nnumpy==2.3.5\npeft==0.21.2  # a comment\nray==2.60.0\nlatex2sympy2_extended==1.11.0\n"


@pytest.fixture
def image(tmp_path: Path) -> Checkout:
    """It has older releases of some packages, and others not at all."""
    checkout = Checkout(tmp_path)
    index = checkout.root / "index"
    index.mkdir()
    for name, *versions in (("torch", "2.9.0", "2.10.0"), ("numpy", "1.26.4", "2.3.5"), ("ray", "2.48.0", "2.60.0")):
        for version in versions:
            wheel(index, name, version, "")
    wheel(index, "torch_npu", "2.9.0", "")
    wheel(index, "latex2sympy2_extended", "1.11.0", "")
    for platform in ("cpu", "npu"):
        (checkout.root / f"requirements-{platform}.txt").write_text(PINS)
    subprocess.run([sys.executable, "-m", "venv", checkout.root / "image"], check=True)
    pip(checkout, "install", "torch==2.9.0", "torch-npu==2.9.0", "numpy==1.26.4", "ray==2.48.0")
    return checkout


def pip(checkout: Checkout, *arguments: str) -> str:
    command = [checkout.root / "image" / "bin" / "python", "-m", "pip", *arguments]
    return subprocess.run(command, cwd=checkout.root, env=PIP, check=True, capture_output=True, text=True).stdout


def versions(checkout: Checkout) -> set[str]:
    return set(pip(checkout, "list", "--format=freeze").replace("_", "-").split())


def add(checkout: Checkout, *arguments: str) -> Ran:
    python = str(checkout.root / "image" / "bin" / "python")
    return checkout.run("install_npu.sh", *arguments, "image", NPU_VLRL_PYTHON=python, **PIP)


def test_what_is_missing_is_added_and_nothing_else_changes(image: Checkout) -> None:
    before = versions(image)
    assert {"torch==2.9.0", "torch-npu==2.9.0", "numpy==1.26.4", "ray==2.48.0"} <= before
    wheel(image.root / "index", "peft", "0.21.2", "", "Requires-Dist: numpy>=2\n")  # would need another numpy
    ran = add(image)
    assert ran.code != 0 and versions(image) == before
    assert "peft 0.21.2 depends on numpy>=2" in ran.said + ran.shown
    assert "step image stopped: pip says above which package of the image stands against a new one" in ran.said

    wheel(image.root / "index", "peft", "0.21.2", "", "Requires-Dist: numpy\nRequires-Dist: torch>=2.0\n")
    shown = add(image, "--dry-run").shown
    assert shown.endswith("build/image.txt peft==0.21.2 latex2sympy2_extended==1.11.0\n") and versions(image) == before
    ran = add(image)
    assert ran.code == 0, ran.said
    assert versions(image) == before | {"peft==0.21.2", "latex2sympy2-extended==1.11.0"}
    assert add(image).shown == "image\n    nothing is missing\n"

    pip(image, "install", "-r", "requirements-npu.txt")  # the control: what pip does without constraints
    assert {"torch==2.10.0", "numpy==2.3.5", "ray==2.60.0"} <= versions(image)
