"""Checks names of the configuration against the known ones, and suggests the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for the first of `names` that is not among `known`, with the nearest known name."""
    known = sorted(known)
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown {what} {name!r}{hint} (known: {', '.join(known) or 'none'})")
