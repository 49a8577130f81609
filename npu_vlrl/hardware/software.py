"""Versions of the software that computes: for the report of `npu-vlrl doctor`, and for what a run leaves behind."""

from __future__ import annotations

import platform as host
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from npu_vlrl import __version__
from npu_vlrl.hardware.base import Platform

PACKAGES = (
    *("torch", "transformers", "tokenizers", "peft", "numpy", "pillow"),
    *("math-verify", "latex2sympy2_extended", "sympy"),  # they decide what an answer is worth
)
"""What results depend on, on every platform."""


def installed(platforms: Iterable[Platform]) -> dict[str, str]:
    """Versions of Python, of this project, and of the packages that these platforms use, as far as they are there."""
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
