"""Reinforcement learning of vision-language models over several turns, on Ascend NPUs, CUDA GPUs and CPUs."""

import os

__version__ = "0.1.0"

# torch would load torch_npu by itself wherever it is installed, and `import torch` would fail on a host without CANN.
# `hardware/` loads it when it is wanted. A script that imports torch before npu_vlrl must set this itself.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
