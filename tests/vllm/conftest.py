"""These tests need the real vLLM, in an environment of its own: `bash launch/test.sh --vllm`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_*.py")
