"""These tests need a Python with transformers 4: `bash launch/test.sh --transformers4` makes it an environment."""

from __future__ import annotations

import os

PYTHON = "NPU_VLRL_TRANSFORMERS4"
"""Names its interpreter. The tests themselves run with the project's transformers."""

collect_ignore_glob = [] if os.environ.get(PYTHON) else ["test_*.py"]
