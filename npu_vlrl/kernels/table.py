"""The op table: every op has one name, a reference that defines it, and maybe a faster implementation for a platform.

Models and losses ask for `op("name")` and never know which implementation they got.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

Implementation = Callable[..., Any]

REFERENCE = "reference"
PLATFORMS = (REFERENCE, "cuda", "npu")

_table: dict[str, dict[str, Implementation]] = {}
_platform = REFERENCE


def register(name: str, platform: str = REFERENCE) -> Callable[[Implementation], Implementation]:
    """Decorator: enters a function as the op `name` on `platform`; the reference of an op must come first."""
    assert platform in PLATFORMS, f"unknown kernel platform {platform!r}"
    implementations = _table.setdefault(name, {}) if platform == REFERENCE else _table.get(name)
    assert implementations is not None, f"op {name!r} has no reference, so nothing defines what it computes"
    assert platform not in implementations, f"op {name!r} is already registered for {platform!r}"

    def enter(implementation: Implementation) -> Implementation:
        implementations[platform] = implementation
        return implementation

    return enter


def use(platform: str) -> None:
    """Selects the implementations that `op` returns from now on. Raises ValueError for an unknown platform.

    The file that registers a platform's implementations is imported here, so no other platform pays for it.
    """
    global _platform
    if platform not in PLATFORMS:
        raise ValueError(f"kernels: unknown platform {platform!r}; choose one of {', '.join(PLATFORMS)}")
    if platform != REFERENCE:
        import_module(f"npu_vlrl.kernels.{platform}")
    _platform = platform


def active() -> dict[str, str]:
    """For each op, the platform whose implementation runs now: the selected one, or the reference where it has none."""
    return {name: _platform if _platform in found else REFERENCE for name, found in sorted(_table.items())}


def op(name: str) -> Implementation:
    """The active implementation of an op. Raises KeyError for a name that is not in the table."""
    implementations = _table[name]
    return implementations.get(_platform, implementations[REFERENCE])


def reference_of(name: str) -> Implementation:
    """The definition of an op, whatever is selected. Raises KeyError for a name that is not in the table."""
    return _table[name][REFERENCE]
