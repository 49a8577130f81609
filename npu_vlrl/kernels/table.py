"""The op table: every op has one name, a reference that defines it, and possibly faster implementations for platforms.

Models and losses call `op("name")`, whichever implementation is active.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from npu_vlrl.hardware.base import HardwareError

Implementation = Callable[..., Any]
I = TypeVar("I", bound=Implementation)  # noqa: E741

REFERENCE = "reference"
PLATFORMS = (REFERENCE, "cuda", "npu")

REFERENCE_OPS = "NPU_VLRL_REFERENCE_OPS"
"""Variable with the names of ops, separated by commas, that run as their reference on any platform. It turns off an
implementation that is wrong or crashes on a machine."""

_table: dict[str, dict[str, Implementation]] = {}
_platform = REFERENCE
_turned_off: frozenset[str] = frozenset()


def register(name: str, platform: str = REFERENCE) -> Callable[[I], I]:
    """Decorator: enters a function as the op `name` on `platform`; the reference of an op must come first."""
    assert platform in PLATFORMS, f"unknown kernel platform {platform!r}"
    implementations = _table.setdefault(name, {}) if platform == REFERENCE else _table.get(name)
    assert implementations is not None, f"op {name!r} has no reference, so nothing defines what it computes"
    assert platform not in implementations, f"op {name!r} is already registered for {platform!r}"

    def enter(implementation: I) -> I:
        implementations[platform] = implementation
        return implementation

    return enter


def use(platform: str) -> None:
    """Selects the implementations that `op` returns from now on. Raises ValueError for an unknown platform, and
    HardwareError when `NPU_VLRL_REFERENCE_OPS` names an unknown op.

    The file that registers a platform's implementations is imported here, so other platforms never import it.
    """
    global _platform, _turned_off
    if platform not in PLATFORMS:
        raise ValueError(f"kernels: unknown platform {platform!r}; choose one of {', '.join(PLATFORMS)}")
    if platform != REFERENCE:
        import_module(f"npu_vlrl.kernels.{platform}")
    _turned_off = _named(os.environ.get(REFERENCE_OPS, ""))
    _platform = platform


def _named(value: str) -> frozenset[str]:
    names = frozenset(filter(None, map(str.strip, value.split(","))))
    if unknown := sorted(names - _table.keys()):
        raise HardwareError(
            f"{REFERENCE_OPS}={value} names {', '.join(unknown)}, and the ops are {', '.join(sorted(_table))}; "
            "write their names with commas between"
        )
    return names


def active() -> dict[str, str]:
    """Platform of each op's active implementation: the selected one, or the reference where that has none or is turned
    off."""
    return {name: _chosen(name) for name in sorted(_table)}


def op(name: str) -> Implementation:
    """The active implementation of an op. Raises KeyError for a name that is not in the table."""
    return _table[name][_chosen(name)]


def _chosen(name: str) -> str:
    return _platform if _platform in _table[name] and name not in _turned_off else REFERENCE


def reference_of(name: str) -> Implementation:
    """The definition of an op, whichever platform is selected. Raises KeyError for a name that is not in the table."""
    return _table[name][REFERENCE]
