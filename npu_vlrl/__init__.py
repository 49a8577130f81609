"""Reinforcement learning of vision-language models over several turns, on Ascend NPUs, CUDA GPUs and CPUs."""

__version__ = "0.1.0"
