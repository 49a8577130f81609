"""These tests need a CUDA device, some two, and some vLLM: `python -m pytest tests/gpu -q` on such a machine."""

from __future__ import annotations

import importlib.util

import torch

_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

_PAIRS = ["test_gpu_sync.py", "test_gpu_shard.py"]

collect_ignore_glob = ["test_*.py"] if _DEVICES == 0 else _PAIRS if _DEVICES == 1 else []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_gpu_vllm.py")
