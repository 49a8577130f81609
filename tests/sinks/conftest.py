"""These tests need the packages of requirements-sinks.txt: `bash launch/test.sh --sinks`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob: list[str] = []
if not all(importlib.util.find_spec(name) for name in ("wandb", "swanlab", "trackio")):
    collect_ignore_glob.append("test_*.py")
