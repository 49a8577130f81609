"""These tests need a CUDA device: `python -m pytest tests/gpu -q` on a machine that has one."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
