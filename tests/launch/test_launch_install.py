"""launch/install_npu.sh on a checkout whose Python only takes notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.checkout import ROOT, Checkout

STEPS = ["check", "wheels", "vllm", "vllm-ascend", "triton", "arctic", "mindspeed"]

INDEX = "https://mirrors.huaweicloud.com/ascend/repos/pypi"
"""Of the vendor's packages: vllm-ascend's images are made with it."""

FAKE_GIT = '#!/usr/bin/env bash\necho "git $*" >>"$RECORD"\n[[ -z ${GIT_OFFLINE:-} ]] && mkdir -p "${@: -1}"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.program("git", FAKE_GIT)
    return checkout


def test_the_steps_come_in_order_and_once(checkout: Checkout) -> None:
    ran = checkout.run("install_npu.sh")
    assert ran.code == 0, ran.said
    assert [line for line in ran.shown.splitlines() if not line.startswith(" ")] == STEPS
    pip = [line.removeprefix("-m pip ") for line in ran.asked if line.startswith("-m pip")]
    assert [line for line in pip if "-r " in line] == [
        "install -qq --disable-pip-version-check -r requirements-npu.txt"
    ]
    assert [line for line in pip if "--no-deps" in line and "==" in line] == [
        "install --no-cache-dir --no-deps --no-build-isolation --no-binary vllm vllm==0.23.0",
        "install --no-deps vllm-ascend==0.23.0",
        f"install --no-deps --extra-index-url {INDEX} triton-ascend==3.2.2",
        "install --no-cache-dir --no-deps --no-build-isolation --no-binary arctic-inference arctic-inference==0.1.1",
    ]
    assert [line.split()[-1] for line in ran.asked if line.startswith("git clone")] == [
        ".venv-npu/src/MindSpeed",
        ".venv-npu/src/Megatron-LM",
    ]
    ran = checkout.run("install_npu.sh", "wheels", "vllm", "vllm-ascend", "triton", "arctic")
    assert (ran.code, ran.asked) == (0, [])  # all is there


def test_on_x86_64_torch_comes_first_and_without_cuda(checkout: Checkout) -> None:
    """torch-npu asks for a build of torch that the index lacks, so pip's resolver cannot be asked there."""
    ran = checkout.run("install_npu.sh", "wheels", MACHINE="x86_64")
    assert ran.code == 0, ran.said
    pins = [pin for pin in ran.asked[1].split() if "==" in pin]
    assert pins == ["torch==2.10.0", "torchvision==0.25.0", "torch-npu==2.10.0.post4", "xgrammar==0.2.9"]
    assert "--no-deps" in ran.asked[1] and ran.asked[2:4] == [
        "launch/torch_without_cuda.py",
        "-m pip install -qq --disable-pip-version-check -r requirements-npu.txt",
    ]


def test_a_dry_run_shows_what_would_be_done(checkout: Checkout) -> None:
    ran = checkout.run("install_npu.sh", "--dry-run")
    assert (ran.code, ran.asked) == (0, [])
    assert "VLLM_TARGET_DEVICE=empty" in ran.shown and "git clone" in ran.shown
    assert not list(checkout.root.glob(".venv*"))
    ran = checkout.run("install_npu.sh", "--dry-run", "vllm-ascend")
    assert ran.shown.splitlines() == [
        "vllm-ascend",
        "    .venv-npu/bin/python -m pip install --no-deps vllm-ascend==0.23.0",
    ]


def test_a_step_that_fails_says_what_to_do(checkout: Checkout) -> None:
    ran = checkout.run("install_npu.sh", "wheels", "mindspeed", GIT_OFFLINE="1")
    assert ran.code != 0
    assert "step mindspeed stopped: it needs git and a way to gitcode.com and github.com" in ran.said
    assert ran.said.endswith("Go on with: bash launch/install_npu.sh mindspeed\n")
    (checkout.root / "offline").touch()
    ran = checkout.run("install_npu.sh", "vllm", "vllm-ascend")
    assert ran.code != 0 and "step vllm stopped: it is built from source" in ran.said
    assert not any("vllm-ascend==" in line for line in ran.asked)


def test_sources_that_were_brought_are_used(checkout: Checkout) -> None:
    checkout.run("install_npu.sh", "wheels")
    for name in ("MindSpeed", "Megatron-LM"):
        (checkout.root / ".venv-npu" / "src" / name).mkdir(parents=True)
    ran = checkout.run("install_npu.sh", "mindspeed", GIT_OFFLINE="1")
    assert ran.code == 0 and not any(line.startswith("git") for line in ran.asked)


def test_a_foreign_triton_is_removed(checkout: Checkout) -> None:
    checkout.run("install_npu.sh", "wheels", "triton")
    (checkout.root / ".venv-npu" / "bin" / "packages" / "triton==3.5.0").touch()
    ran = checkout.run("install_npu.sh", "triton")
    assert ran.asked == [
        "-m pip uninstall --yes triton triton-ascend",
        f"-m pip install --no-deps --extra-index-url {INDEX} triton-ascend==3.2.2",
    ]


def test_what_is_found_is_told(checkout: Checkout) -> None:
    checkout.program("npu-smi", "#!/bin/sh\necho '| npu-smi 25.5.0   Version: 25.5.0  |'\n")
    cann = checkout.home / "Ascend" / "cann" / "set_env.sh"
    cann.parent.mkdir(parents=True)
    cann.touch()
    shown = checkout.run("install_npu.sh", "check").shown
    assert "driver: Version: 25.5.0" in shown and f"CANN: {cann}" in shown and "no NPU" not in shown
    (checkout.tools / "npu-smi").unlink()
    cann.unlink()
    shown = checkout.run("install_npu.sh", "check", MACHINE="x86_64").shown
    assert "no NPU is visible" in shown and "CANN: none found" in shown and "PIP_EXTRA_INDEX_URL" in shown


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["check"], {"MACHINE": "riscv64"}, "torch-npu has wheels for Linux on aarch64 and x86_64 only"),
        (["mindsped"], {}, "mindsped is not a step; they are: " + " ".join(STEPS) + " image"),
    ],
)
def test_what_cannot_be_is_refused(
    checkout: Checkout, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    ran = checkout.run("install_npu.sh", *arguments, **variables)
    assert ran.code == 2 and message in ran.said and ran.asked == []


def test_an_interpreter_without_torch_npu_is_no_image(checkout: Checkout) -> None:
    ran = checkout.run("install_npu.sh", "image", NPU_VLRL_PYTHON=str(checkout.python))
    assert ran.code == 2 and "a-python has no torch-npu, so it is not that of an image for NPUs" in ran.said


def test_versions_stand_in_one_way_in_script_and_requirements() -> None:
    script = (ROOT / "launch" / "install_npu.sh").read_text()
    versions = dict(re.findall(r"\b(vllm|arctic|triton|mindspeed|megatron)=(\S+)", script))
    text = (ROOT / "requirements-npu.txt").read_text()
    for name, version in (("vllm", "vllm"), ("vllm-ascend", "vllm"), ("triton-ascend", "triton")):
        assert f"- {name} {versions[version]}, step {version if name != 'vllm-ascend' else name}" in text
    for words in ("arctic-inference {arctic}, step arctic", "mindspeed {mindspeed} with Megatron {megatron}, step"):
        assert words.format(**versions) in text
