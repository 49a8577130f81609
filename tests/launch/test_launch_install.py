"""launch/install_npu.sh on a checkout whose Python only takes notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.checkout import ROOT, Checkout

STEPS = ["check", "trainer", "sampler", "vllm", "arctic", "vllm-ascend", "triton", "mindspeed"]

FAKE_GIT = '#!/usr/bin/env bash\necho "git $*" >>"$RECORD"\n[[ -z ${GIT_OFFLINE:-} ]] && mkdir -p "${@: -1}"\n'
FAKE_UNAME = '#!/bin/sh\ncase "$1" in -m) echo "${MACHINE:-aarch64}";; *) echo Linux;; esac\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.program("git", FAKE_GIT)
    checkout.program("uname", FAKE_UNAME)
    return checkout


def test_the_steps_come_in_order_and_once(checkout: Checkout) -> None:
    ran = checkout.run("install_npu.sh")
    assert ran.code == 0, ran.said
    assert [line for line in ran.shown.splitlines() if not line.startswith(" ")] == STEPS
    pip = [line.removeprefix("-m pip ") for line in ran.asked if line.startswith("-m pip")]
    assert [line for line in pip if "-r " in line] == [
        "install -qq --disable-pip-version-check -r requirements-npu.txt",
        "install -qq --disable-pip-version-check -r requirements-vllm-ascend.txt",
    ]
    built = [line for line in pip if "--no-deps" in line and "==" in line]
    assert built == [
        "install --no-cache-dir --no-deps --no-build-isolation --no-binary vllm vllm==0.18.0",
        "install --no-cache-dir --no-deps --no-build-isolation --no-binary arctic-inference arctic-inference==0.1.1",
        "install --no-deps vllm-ascend==0.18.0",
        "install --no-deps --force-reinstall triton-ascend==3.2.0",
        "install --no-deps --force-reinstall triton-ascend==3.2.0",
    ]
    assert [line.split()[-1] for line in ran.asked if line.startswith("git clone")] == [
        ".venv-npu/src/MindSpeed",
        ".venv-npu/src/Megatron-LM",
    ]
    ran = checkout.run("install_npu.sh", "trainer", "sampler", "vllm", "arctic", "vllm-ascend", "triton")
    assert (ran.code, ran.asked) == (0, [])  # all is there


def test_a_dry_run_shows_what_would_be_done(checkout: Checkout) -> None:
    ran = checkout.run("install_npu.sh", "--dry-run")
    assert (ran.code, ran.asked) == (0, [])
    assert "VLLM_TARGET_DEVICE=empty" in ran.shown and "git clone" in ran.shown
    assert not list(checkout.root.glob(".venv*"))
    ran = checkout.run("install_npu.sh", "--dry-run", "vllm-ascend")
    assert ran.shown.splitlines() == [
        "vllm-ascend",
        "    .venv-vllm-ascend/bin/python -m pip install --no-deps vllm-ascend==0.18.0",
    ]


def test_a_step_that_fails_says_what_to_do(checkout: Checkout) -> None:
    ran = checkout.run("install_npu.sh", "trainer", "mindspeed", GIT_OFFLINE="1")
    assert ran.code != 0
    assert "step mindspeed stopped: it needs git and a way to gitcode.com and github.com" in ran.said
    assert ran.said.endswith("Go on with: bash launch/install_npu.sh mindspeed\n")
    (checkout.root / "offline").touch()
    ran = checkout.run("install_npu.sh", "sampler", "vllm")
    assert ran.code != 0 and "step sampler stopped" in ran.said
    assert not any("vllm==" in line for line in ran.asked)


def test_sources_that_were_brought_are_used(checkout: Checkout) -> None:
    checkout.run("install_npu.sh", "trainer")
    for name in ("MindSpeed", "Megatron-LM"):
        (checkout.root / ".venv-npu" / "src" / name).mkdir(parents=True)
    ran = checkout.run("install_npu.sh", "mindspeed", GIT_OFFLINE="1")
    assert ran.code == 0 and not any(line.startswith("git") for line in ran.asked)


def test_a_foreign_triton_is_removed(checkout: Checkout) -> None:
    checkout.run("install_npu.sh", "trainer", "sampler", "triton")
    (checkout.root / ".venv-npu" / "bin" / "packages" / "triton==3.5.0").touch()
    ran = checkout.run("install_npu.sh", "triton")
    assert ran.asked == [
        "-m pip uninstall --yes triton",
        "-m pip install --no-deps --force-reinstall triton-ascend==3.2.0",
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
        (["mindsped"], {}, "mindsped is not a step; they are: " + " ".join(STEPS)),
    ],
)
def test_what_cannot_be_is_refused(
    checkout: Checkout, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    ran = checkout.run("install_npu.sh", *arguments, **variables)
    assert ran.code == 2 and message in ran.said and ran.asked == []


def test_versions_stand_in_one_way_in_script_and_requirements() -> None:
    script = (ROOT / "launch" / "install_npu.sh").read_text()
    versions = dict(re.findall(r"\b(vllm|arctic|triton|mindspeed|megatron)=(\S+)", script))
    text = (ROOT / "requirements-npu.txt").read_text()
    for words in ("vllm {vllm}", "vllm-ascend {vllm}", "arctic-inference {arctic}", "mindspeed {mindspeed}"):
        assert words.format(**versions) in text
    assert f"triton-ascend=={versions['triton']}" in text
    assert f"Megatron {versions['megatron']}" in text
