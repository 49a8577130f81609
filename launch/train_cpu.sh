#!/usr/bin/env bash
# Trains on the CPU: bash launch/train_cpu.sh [--config FILE] [--run-dir DIR] [key=value …]
# Without arguments it is the quick start, configs/photo_tiny.yaml. Relative paths start at the repository's root.
# NPU_VLRL_PYTHON, NPU_VLRL_PROCESSES, NNODES and the rest: see launch/train_npu.sh.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

choose_python .venv requirements-cpu.txt
export NPU_VLRL_PLATFORM=cpu
train 1 "$@"
