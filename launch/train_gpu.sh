#!/usr/bin/env bash
# Trains on an NVIDIA GPU: bash launch/train_gpu.sh [--config FILE] [--run-dir DIR] [key=value …]
# Relative paths start at the repository's root.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ "$(nvidia-smi --list-gpus 2>/dev/null)" == GPU* ]] ||
    fail "no NVIDIA GPU found (nvidia-smi lists none); install its driver, or train with launch/train_cpu.sh"
prepare .venv-gpu requirements-gpu.txt
export NPU_VLRL_PLATFORM=cuda
train .venv-gpu "$@"
