#!/usr/bin/env bash
# Installs what trains and samples on Ascend NPUs into .venv-npu, step by step; what is there already is left alone.
#   bash launch/install_npu.sh              all steps, in order
#   bash launch/install_npu.sh STEP …       chosen steps
#   bash launch/install_npu.sh --dry-run …  shows the commands and runs none
# Steps: check wheels vllm vllm-ascend triton arctic mindspeed; and image, for a container image's own Python:
#   NPU_VLRL_PYTHON=/path/to/python bash launch/install_npu.sh image
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

environment=.venv-npu steps='check wheels vllm vllm-ascend triton arctic mindspeed'
vllm=0.23.0 arctic=0.1.1 triton=3.2.2 mindspeed=26.1.0_core_r0.12.1 megatron=core_v0.12.1
vendor_index=https://mirrors.huaweicloud.com/ascend/repos/pypi # where vllm-ascend's own images get triton-ascend

run() { # COMMAND…: runs it, or only shows it
    printf '   '
    printf ' %q' "$@"
    echo
    [[ -n $dry ]] || "$@"
}

# PACKAGE VERSION: builds it in the environment, whose programs come first: its build looks for nanobind with the
# python3 of PATH. Isolated, pip would fetch another torch to build with; from its cache it could take a build for
# another device. The variables keep torch-npu from looking for CANN, and vllm from the name 0.23.0+empty, which pip
# refuses.
build() {
    if has "$environment" "$1" "$2"; then
        echo "    $1 $2 is installed"
        return
    fi
    PATH="$PWD/$environment/bin:$PATH" run env \
        VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE="$vllm" TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
        "$environment/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation --no-binary "$1" "$1==$2"
}

step_check() {
    local found
    case "$(uname -s) $(uname -m)" in
    'Linux aarch64') ;;
    'Linux x86_64')
        echo "    x86_64: torch-npu wants torch 2.10.0+cpu. Name PyTorch's own CPU index in PIP_EXTRA_INDEX_URL, or the" \
            "public index's build is made to run without NVIDIA's packages (with gcc)"
        ;;
    *) fail "$(uname -s) on $(uname -m): torch-npu has wheels for Linux on aarch64 and x86_64 only" ;;
    esac
    found=$(find_python)
    echo "    Python: $found, $("$found" --version)"
    if has_npu; then
        echo "    driver: $(npu-smi info 2>/dev/null | grep -o 'Version: *[^ ]*' | head -n 1)"
    else
        echo "    driver: no NPU is visible. All can be installed, nothing can be run: install driver and firmware"
    fi
    found=$(find_cann)
    echo "    CANN: ${found:-none found: install the toolkit, the kernels and NNAL of one release, see docs/ascend.md}"
}

step_wheels() { run prepare "$environment" requirements-npu.txt; }
step_vllm() { build vllm "$vllm"; }
step_arctic() { build arctic-inference "$arctic"; }

step_vllm-ascend() {
    if has "$environment" vllm-ascend "$vllm"; then
        echo "    vllm-ascend $vllm is installed"
    else
        run "$environment/bin/python" -m pip install --no-deps "vllm-ascend==$vllm"
    fi
}

step_triton() { # triton-ascend and triton fill the same folder: whichever came last is there
    if has "$environment" triton-ascend "$triton" && ! has "$environment" triton; then
        echo "    triton-ascend $triton is alone in $environment"
        return
    fi
    run "$environment/bin/python" -m pip uninstall --yes triton triton-ascend
    run "$environment/bin/python" -m pip install --no-deps --extra-index-url "$vendor_index" "triton-ascend==$triton"
}

step_mindspeed() { # without dependencies: its tokenizers is older than that of transformers 5
    if has "$environment" mindspeed; then
        echo "    mindspeed is installed"
        return
    fi
    [[ -d $environment/src/MindSpeed ]] ||
        run git clone --depth 1 -b "$mindspeed" https://gitcode.com/Ascend/MindSpeed.git "$environment/src/MindSpeed"
    [[ -d $environment/src/Megatron-LM ]] ||
        run git clone --depth 1 -b "$megatron" https://github.com/NVIDIA/Megatron-LM.git "$environment/src/Megatron-LM"
    run "$environment/bin/python" -m pip install pybind11 ninja einops six
    run "$environment/bin/python" -m pip install --no-deps --no-build-isolation -e "$environment/src/Megatron-LM"
    run "$environment/bin/python" -m pip install --no-deps --no-build-isolation -e "$environment/src/MindSpeed"
}

# Adds what the project imports and the image lacks. All that the image has is a constraint: pip changes none of it.
step_image() {
    local python=${NPU_VLRL_PYTHON:-python3} here=build/image.txt name missing=()
    "$python" -m pip list --disable-pip-version-check --format=freeze >"$here"
    grep -qiE '^torch[-_]npu==' "$here" || fail "$python has no torch-npu, so it is not that of an image for NPUs. Name \
another one: NPU_VLRL_PYTHON=/path/to/python; or make an environment: bash launch/install_npu.sh"
    for name in ray $(sed -nE 's/^([A-Za-z0-9_-]+)==.*/\1/p' requirements-cpu.txt); do
        grep -qiE "^${name//[-_]/[-_.]}==" "$here" || missing+=("$(grep -oE "^$name==[^ ;]+" requirements-npu.txt)")
    done
    if ((${#missing[@]} == 0)); then
        echo "    nothing is missing"
        return
    fi
    run "$python" -m pip install --constraint "$here" "${missing[@]}"
}

remedy() { # STEP
    case "$1" in
    check) echo "the machine lacks something: see the message" ;;
    wheels) echo "pip found no wheels (bash launch/check_requirements.sh requirements-npu.txt:$(uname -m):3.11 shows why), \
or on x86_64 there is no gcc" ;;
    vllm | arctic) echo "it is built from source: it needs the step wheels, g++ and Python's headers" ;;
    vllm-ascend) echo "it needs the step wheels, and a wheel for this machine" ;;
    triton) echo "it needs the step wheels, and a way to the index $vendor_index" ;;
    mindspeed) echo "it needs git and a way to gitcode.com and github.com: on a machine without, put checkouts of \
MindSpeed ($mindspeed) and Megatron-LM ($megatron) into $environment/src. Training runs without it" ;;
    image) echo "pip says above which package of the image stands against a new one; install an older release of the \
new one by hand" ;;
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
# shellcheck disable=SC2086
(($#)) || set -- $steps
for step in "$@"; do
    declare -F "step_$step" >/dev/null || fail "$step is not a step; they are: $steps image"
done
exec 8<launch/install_npu.sh
flock 8 2>/dev/null || true # a second script waits for this one
trap told EXIT
for step in "$@"; do
    echo "$step"
    "step_$step"
done
