"""Versions of the software that computes: for the report of `npu-vlrl doctor`, and for the summary of a run."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from npu_vlrl import __version__
from npu_vlrl.hardware.base import Platform

PACKAGES = (
    *("torch", "transformers", "tokenizers", "peft", "numpy", "pillow"),
    *("math-verify", "latex2sympy2_extended", "sympy"),  # they decide what an answer is worth
)
"""Packages that results depend on, on every platform."""

TRANSFORMERS = ("5.5.4", "5.24.0")
"""The oldest and the newest release that the project was tried with. `model/versions.py` has the differences.

CI runs 5.10.4, 5.19.0 and 5.24.0. 5.5.4 is what images of vllm-ascend 0.23.0 have: tests of models and kernels passed.
"""


def installed(platforms: Iterable[Platform]) -> dict[str, str]:
    """Versions of Python, of this project, and of the packages of these platforms that are installed."""
    found = {"python": host.python_version(), "npu_vlrl": __version__}
    for package in dict.fromkeys([*PACKAGES, *(name for platform in platforms for name in platform.packages)]):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def versions(platform: Platform) -> dict[str, str]:
    """Versions of all that computes on a usable platform, with the vendor's own software."""
    return installed([platform]) | platform.versions()


def unsupported() -> str | None:
    """Reason for which the installed transformers is not supported, with the remedy; None where it is.

    A release between the two of `TRANSFORMERS` counts as tested, and so does a later patch of the newest.
    """
    oldest, newest = (_numbers(release) for release in TRANSFORMERS)
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = ""
    if oldest <= _numbers(found) and _numbers(found)[:2] <= newest[:2]:
        return None
    return (
        f"{f'transformers {found}' if found else 'no transformers'} is installed, and npu_vlrl was tested with "
        f"{TRANSFORMERS[0]} to {TRANSFORMERS[1]}; install what the requirements file of your platform pins "
        f"(requirements-cpu.txt, -gpu.txt, -npu.txt), or pip install transformers=={TRANSFORMERS[1]}"
    )


def _numbers(release: str) -> tuple[int, ...]:
    """Numbers of a release: `(5, 10, 4)` for `5.10.4`, `5.10.4rc1` and `5.10.4+local`; empty where there are none."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, found[0].split("."))) if found else ()
