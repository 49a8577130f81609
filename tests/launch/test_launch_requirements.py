"""launch/check_requirements.sh with the real pip, on an index of a few wheels made here."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch.checkout import Checkout, Ran

MARKED = """
native==1.0; platform_machine == "aarch64"
native==2.0; platform_machine != "aarch64"
"""


def wheel(folder: Path, name: str, version: str, machine: str, needs: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    platform = f"manylinux_2_28_{machine}" if machine else "any"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-{platform}.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{platform}\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Its index has `native` 1.0 for aarch64, which needs `part` there, and `native` 2.0 for x86_64."""
    checkout = Checkout(tmp_path)
    index = checkout.root / "index"
    index.mkdir()
    wheel(index, "native", "1.0", "aarch64", 'Requires-Dist: part; platform_machine == "aarch64"\n')
    wheel(index, "native", "2.0", "x86_64", 'Requires-Dist: part; platform_machine == "aarch64"\n')
    wheel(index, "part", "3.0", "")
    return checkout


def run(checkout: Checkout, *pairs: str) -> Ran:
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "index", "PIP_CONFIG_FILE": "/dev/null"}
    return checkout.run("check_requirements.sh", *pairs, PYTHON=sys.executable, **pip)


def check(checkout: Checkout, requirements: str, *machines: str) -> Ran:
    (checkout.root / "wanted.txt").write_text(requirements)
    return run(checkout, *(f"wanted.txt:{machine}" for machine in machines))


def test_markers_are_those_of_the_other_machine(checkout: Checkout) -> None:
    ran = check(checkout, MARKED, "aarch64", "x86_64")
    assert ran.code == 0, ran.said
    assert ran.shown.splitlines() == [
        "wanted.txt on aarch64, Python 3.11",
        "  native==1.0  part==3.0",
        "wanted.txt on x86_64, Python 3.11",
        "  native==2.0",
    ]


def test_a_wrong_pin_is_found(checkout: Checkout) -> None:
    ran = check(checkout, MARKED.replace("1.0", "1.1"), "x86_64", "aarch64")
    assert ran.code == 1
    assert "No matching distribution found for native==1.1" in ran.said
    assert ran.said.endswith("do not resolve: wanted.txt:aarch64 (pip's reason stands above)\n")


def test_a_wheel_for_another_machine_is_none(checkout: Checkout) -> None:
    assert check(checkout, "native==2.0\n", "aarch64").code == 1


def test_markers_are_those_of_the_other_python(checkout: Checkout) -> None:
    marked = 'native==2.0; python_version < "3.12"\npart==3.0; python_version >= "3.12"\n'
    ran = check(checkout, marked, "x86_64:3.12", "x86_64:3.11")
    assert ran.code == 0, ran.said
    assert ran.shown.splitlines() == [
        "wanted.txt on x86_64, Python 3.12",
        "  part==3.0",
        "wanted.txt on x86_64, Python 3.11",
        "  native==2.0",
    ]


def test_nothing_is_installed(checkout: Checkout) -> None:
    check(checkout, MARKED, "aarch64")
    assert not (checkout.root / "build" / "none").exists()


def test_without_arguments_all_files_are_asked_about(checkout: Checkout) -> None:
    """The index has none of what they name: every one is reported."""
    ran = run(checkout)
    assert ran.code == 1
    assert ran.said.splitlines()[-1].startswith(
        "do not resolve: requirements-cpu.txt:x86_64 requirements-cpu.txt:aarch64 requirements-gpu.txt:x86_64 "
        "requirements-npu.txt:x86_64 requirements-npu.txt:x86_64:3.12 requirements-npu.txt:aarch64 "
        "requirements-npu.txt:aarch64:3.12 requirements-vllm-cpu.txt:x86_64 "
    )


@pytest.mark.parametrize(
    "pair", ["wanted.txt", "wanted.txt:riscv64", "missing.txt:aarch64", "wanted.txt:aarch64:3.10", "wanted.txt:3.12"]
)
def test_a_wrong_pair_is_named(checkout: Checkout, pair: str) -> None:
    (checkout.root / "wanted.txt").touch()
    ran = run(checkout, pair)
    assert ran.code == 2 and f"{pair} is not FILE:x86_64 or FILE:aarch64" in ran.said
