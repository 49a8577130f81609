#!/usr/bin/env bash
# Trains on NVIDIA GPUs: bash launch/train_gpu.sh [--config FILE] [--run-dir DIR] [key=value …]
# Relative paths start at the repository's root. By default one process on one GPU.
# NPU_VLRL_PYTHON, NPU_VLRL_PROCESSES, NNODES and the rest: see launch/train_npu.sh.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ "$(nvidia-smi --list-gpus 2>/dev/null)" == GPU* ]] ||
    fail "no NVIDIA GPU found (nvidia-smi lists none); install its driver, or train with launch/train_cpu.sh"
choose_python .venv-gpu requirements-gpu.txt
export NPU_VLRL_PLATFORM=cuda
apply_launch_settings
train 1 "$@"
