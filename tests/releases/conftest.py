"""These tests need a second Python that runs the project, with another release: `NPU_VLRL_OTHER_PYTHON`."""

from __future__ import annotations

import os

PYTHON = "NPU_VLRL_OTHER_PYTHON"
"""Names its interpreter. The tests themselves run with the release of the environment that starts them."""

collect_ignore_glob = [] if os.environ.get(PYTHON) else ["test_*.py"]
