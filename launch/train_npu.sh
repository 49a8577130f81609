#!/usr/bin/env bash
# Trains on Ascend NPUs: bash launch/train_npu.sh [--config FILE] [--run-dir DIR] [key=value …]
# Relative paths start at the repository's root. docs/ascend.md says more.
#
#   NPU_VLRL_PYTHON=/path/to/python  uses that interpreter as it is, for example a container image's own, and installs
#                                    nothing; else launch/install_npu.sh makes .venv-npu
#   NPU_VLRL_PROCESSES=N             processes on this machine; on NPUs as many as devices are visible. The first is the
#                                    learner, each other one an engine; 1 is both in one, and with
#                                    train.learners=all each is both
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT
#                                    several machines: start the script on each, with the same NNODES and MASTER_ADDR
#   NPU_VLRL_HOST_CANN=1             no NPU: the same script and the real torch_npu, on the tests' stand-in for CANN
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

host_cann_environment() { # prints shell lines; where the libraries are is what set_env.sh says on a host
    "$python" -c 'import os, shlex
from tests.host_cann import build, environment
libraries = ":".join(filter(None, [str(build.build()), os.environ.get("LD_LIBRARY_PATH")]))
for name, value in {"LD_LIBRARY_PATH": libraries, **environment()}.items():
    print(f"export {name}={shlex.quote(value)}")'
}

if [[ ${NPU_VLRL_HOST_CANN:-} == 1 ]]; then
    choose_python .venv-npu requirements-npu.txt
    settings=$(host_cann_environment)
    eval "$settings"
else
    has_npu || fail "no Ascend NPU found (npu-smi lists none, and there is no /dev/davinci0); install driver and \
firmware, or train with launch/train_cpu.sh. NPU_VLRL_HOST_CANN=1 runs this script without an NPU"
    source_cann
    choose_python .venv-npu requirements-npu.txt
fi
export NPU_VLRL_PLATFORM=npu
apply_launch_settings
if [[ -z ${NPU_VLRL_PROCESSES:-} ]]; then
    NPU_VLRL_PROCESSES=$("$python" -c 'from npu_vlrl.hardware import select; print(select().device_count())')
fi
train "$NPU_VLRL_PROCESSES" "$@"
