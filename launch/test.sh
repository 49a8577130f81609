#!/usr/bin/env bash
# Checks style and types, and runs all tests: bash launch/test.sh
# Runs chosen tests only:                     bash launch/test.sh tests/data -q
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare .venv requirements-cpu.txt
add .venv requirements-dev.txt
add .venv requirements-test-data.txt --no-deps
export NPU_VLRL_PLATFORM=cpu OMP_NUM_THREADS=1 # more threads than cores make small tensors slow
run() { .venv/bin/python -m "$@"; }

if (($#)); then
    run pytest "$@"
else
    run ruff check .
    run ruff format --check .
    run mypy
    run pytest -q -n 2 --cov --cov-fail-under=90
fi
