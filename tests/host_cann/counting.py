"""What ran on the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counters: list[Counter[str]] = []


def count(name: str) -> None:
    for counter in _counters:
        counter[name] += 1


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what runs inside it, in every thread of this process.

    "aclnnRmsNorm" is a fused operator, by the name that torch_npu calls; "aten::mm" ran on the device;
    "fallback::nextafter" has no kernel in torch_npu, which would copy its tensors to the host and back;
    "copied::value" was not contiguous where an operator wants it to be, so that CANN copies it first.
    """
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]
