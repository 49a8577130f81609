"""These tests need a CUDA device, and some two: `python -m pytest tests/gpu -q` on such a machine."""

from __future__ import annotations

import torch

_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

collect_ignore_glob = (
    ["test_*.py"] if _DEVICES == 0 else ["test_gpu_sync.py", "test_gpu_shard.py"] if _DEVICES == 1 else []
)
