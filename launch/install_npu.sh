#!/usr/bin/env bash
# Installs what trains and samples on Ascend NPUs, step by step; what is there already is left alone.
#   bash launch/install_npu.sh              all steps, in order
#   bash launch/install_npu.sh STEP …       chosen steps
#   bash launch/install_npu.sh --dry-run …  shows the commands and runs none
# Steps: check trainer sampler vllm arctic vllm-ascend triton mindspeed
# The trainer lives in .venv-npu and vllm-ascend in .venv-vllm-ascend: what they pin contradicts.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

trainer=.venv-npu sampler=.venv-vllm-ascend
vllm=0.18.0 arctic=0.1.1 triton=3.2.0 mindspeed=26.1.0_core_r0.12.1 megatron=core_v0.12.1

run() { # COMMAND…: runs it, or only shows it
    printf '   '
    printf ' %q' "$@"
    echo
    [[ -n $dry ]] || "$@"
}

# PACKAGE VERSION: builds it in the sampler's environment, whose programs come first: its build looks for nanobind with
# the python3 of PATH. Isolated, pip would fetch another torch to build with; from its cache it could take a build for
# another device. The variables keep torch-npu from looking for CANN, and vllm from the name 0.18.0+empty, which pip
# refuses.
build() {
    if has "$sampler" "$1" "$2"; then
        echo "    $1 $2 is installed"
        return
    fi
    PATH="$PWD/$sampler/bin:$PATH" run env \
        VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE="$vllm" TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
        "$sampler/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation --no-binary "$1" "$1==$2"
}

step_check() {
    local found
    case "$(uname -s) $(uname -m)" in
    'Linux aarch64') ;;
    'Linux x86_64')
        echo "    x86_64: the trainer gets torch and torch-npu 2.13.0. The sampler's torch-npu 2.9.0 needs torch 2.9.0+cpu:" \
            "name PyTorch's own CPU index in PIP_EXTRA_INDEX_URL, or leave out the sampler's steps"
        ;;
    *) fail "$(uname -s) on $(uname -m): torch-npu has wheels for Linux on aarch64 and x86_64 only" ;;
    esac
    found=$(find_python)
    "$found" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
        fail "$("$found" --version): Python 3.11 is what torch-npu, vllm-ascend and triton-ascend all have wheels for; \
name one: PYTHON=/path/to/python3.11"
    echo "    Python: $found, $("$found" --version)"
    if has_npu; then
        echo "    driver: $(npu-smi info 2>/dev/null | grep -o 'Version: *[^ ]*' | head -n 1)"
    else
        echo "    driver: no NPU is visible. All can be installed, nothing can be run: install driver and firmware"
    fi
    found=$(find_cann)
    echo "    CANN: ${found:-none found: install the toolkit, the kernels and NNAL of one release, see docs/ascend.md}"
}

step_trainer() { run prepare "$trainer" requirements-npu.txt; }
step_sampler() { run prepare "$sampler" requirements-vllm-ascend.txt; }
step_vllm() { build vllm "$vllm"; }
step_arctic() { build arctic-inference "$arctic"; }

step_vllm-ascend() {
    if has "$sampler" vllm-ascend "$vllm"; then
        echo "    vllm-ascend $vllm is installed"
    else
        run "$sampler/bin/python" -m pip install --no-deps "vllm-ascend==$vllm"
    fi
}

step_triton() { # triton-ascend and triton fill the same folder: whichever came last is there
    local environment
    for environment in "$trainer" "$sampler"; do
        if has "$environment" triton-ascend "$triton" && ! has "$environment" triton; then
            echo "    triton-ascend $triton is alone in $environment"
            continue
        fi
        run "$environment/bin/python" -m pip uninstall --yes triton
        run "$environment/bin/python" -m pip install --no-deps --force-reinstall "triton-ascend==$triton"
    done
}

step_mindspeed() { # without dependencies: its tokenizers is older than that of transformers 5
    if has "$trainer" mindspeed; then
        echo "    mindspeed is installed"
        return
    fi
    [[ -d $trainer/src/MindSpeed ]] ||
        run git clone --depth 1 -b "$mindspeed" https://gitcode.com/Ascend/MindSpeed.git "$trainer/src/MindSpeed"
    [[ -d $trainer/src/Megatron-LM ]] ||
        run git clone --depth 1 -b "$megatron" https://github.com/NVIDIA/Megatron-LM.git "$trainer/src/Megatron-LM"
    run "$trainer/bin/python" -m pip install pybind11 ninja einops six
    run "$trainer/bin/python" -m pip install --no-deps --no-build-isolation -e "$trainer/src/Megatron-LM"
    run "$trainer/bin/python" -m pip install --no-deps --no-build-isolation -e "$trainer/src/MindSpeed"
}

remedy() { # STEP
    case "$1" in
    check) echo "the machine lacks something: see the message" ;;
    trainer) echo "pip found no wheels; bash launch/check_requirements.sh requirements-npu.txt:$(uname -m) shows why" ;;
    sampler) echo "on x86_64 it needs PyTorch's own CPU index (PIP_EXTRA_INDEX_URL)" ;;
    vllm | arctic) echo "it is built from source: it needs the step sampler, g++ and Python's headers" ;;
    vllm-ascend | triton) echo "it needs the steps before it, and a wheel for this machine" ;;
    mindspeed) echo "it needs git and a way to gitcode.com and github.com: on a machine without, put checkouts of \
MindSpeed ($mindspeed) and Megatron-LM ($megatron) into $trainer/src. Training runs without it" ;;
    esac
}

told() { # at the end: which step did not come to its own
    local code=$?
    ((code == 0)) || echo "install_npu.sh: step $step stopped: $(remedy "$step"). Go on with: bash launch/install_npu.sh $step" >&2
}

dry='' step=check
if [[ ${1:-} == --dry-run ]]; then
    dry=1
    shift
fi
(($#)) || set -- check trainer sampler vllm arctic vllm-ascend triton mindspeed
for step in "$@"; do
    declare -F "step_$step" >/dev/null || fail "$step is not a step; they are: check trainer sampler vllm arctic vllm-ascend triton mindspeed"
done
trap told EXIT
for step in "$@"; do
    echo "$step"
    "step_$step"
done
