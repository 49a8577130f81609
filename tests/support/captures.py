"""Graph captures without a device that captures: see `hardware.base.GraphCapture`."""

from __future__ import annotations

from collections.abc import Callable


def right(work: Callable[[], None]) -> Callable[[], None]:
    work()
    return work


def frozen(work: Callable[[], None]) -> Callable[[], None]:
    """Its replay says what was true when the record was made, as where an operator took a length from the host."""
    work()
    return lambda: None


def failing(work: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("this operator is not for graphs\n[ERROR] more of it")
