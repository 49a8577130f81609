#!/usr/bin/env bash
# Installs the project as people do, and runs it in another folder:  bash launch/check_install.sh
# The wheel goes into an environment of its own that borrows the packages of .venv. Whether pip finds what the project
# and its extras ask for, it is asked without installing it.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

extras=plots,games,ray,browser,tensorboard

prepare .venv requirements-cpu.txt
place=$PWD/build/install
rm -rf "$place"
mkdir -p "$place/source" "$place/elsewhere"
cp -R pyproject.toml README.md LICENSE configs npu_vlrl "$place/source" # others build in this folder at the same time
packages_of() { # ENVIRONMENT
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}
.venv/bin/python -m venv "$place/environment"

"$place/environment/bin/python" -m pip install --dry-run --ignore-installed -qq --disable-pip-version-check \
    --only-binary=:all: --report "$place/report.json" "$place/source[$extras]"
pip_install "$place/environment" --no-deps "$place/source"
packages_of .venv >"$(packages_of "$place/environment")/borrowed.pth"

cd "$place/elsewhere"
unset PYTHONPATH
export NPU_VLRL_PLATFORM=cpu OMP_NUM_THREADS=1
program=$place/environment/bin/npu-vlrl
"$place/environment/bin/python" -c '
import npu_vlrl, sys
assert npu_vlrl.__file__.startswith(sys.argv[1]), npu_vlrl.__file__' "$place/environment"
"$program" train --config photo_tiny --run-dir run train.steps=1 warm_start.steps=1 evaluation.tasks=4 rollout.groups=2
[[ -f run/summary.json ]]
"$program" data geo3k --out runs/data/geo3k
"$program" data check --config geo3k_tiny
"$program" config --config tasks/sokoban --config models/qwen3_vl_4b --config devices/one >/dev/null
"$program" view run --out page.html # assets of the page
echo "installed and run"
