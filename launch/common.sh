# Sourced by the other launch scripts: makes a virtual environment once, and again when its requirements change;
# chooses the interpreter; starts a training of one process or of several.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p build # for locks of environments, and what scripts note

fail() { # MESSAGE: bad input or missing hardware
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

find_python() { # prints a Python of a supported version; $PYTHON is tried first
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3 python; do
        if [[ -n $candidate ]] && "$candidate" -c \
            'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 with its venv module is needed, and $(python3 --version 2>&1 | head -n 1) is what \
python3 gives. Install one (Debian, Ubuntu: python3.11 python3.11-venv), or name one: PYTHON=/path/to/python3.11"
}

installed() { # ENVIRONMENT NAME FILE...: the stamp is there and tells of these files in this folder
    [[ "$(cat "$1/installed-$2" 2>/dev/null)" == "$(stamp "${@:3}")" ]]
}

stamp() { # FILE...
    pwd
    cksum "$@"
}

pip_install() { # ENVIRONMENT ARGUMENT...
    "$1/bin/python" -m pip install -qq --disable-pip-version-check "${@:2}"
}

# ENVIRONMENT REQUIREMENTS: makes the environment and installs the requirements and the project.
# The stamp is written last, so an interrupted installation starts afresh; the lock makes a second script wait for it.
prepare() (
    flock 9 2>/dev/null || true # macOS has none
    if installed "$1" base "$2" pyproject.toml; then return; fi
    python=$(find_python)
    echo "setting up $1 from $2 with $("$python" --version); this takes a few minutes" >&2
    "$python" -m venv --clear "$1"
    if [[ $2 == requirements-npu.txt && $(uname -m) == x86_64 ]]; then torch_for_npu "$1"; fi
    pip_install "$1" -r "$2"
    pip_install "$1" --no-deps -e .
    stamp "$2" pyproject.toml >"$1/installed-base"
) 9>"build/$1.lock"

# ENVIRONMENT: torch and torch-npu on x86_64, where torch-npu asks for a build of torch that the public index lacks. With
# an index that has it (PIP_EXTRA_INDEX_URL) that one is taken; else the one for NVIDIA GPUs, without NVIDIA's packages.
torch_for_npu() {
    # shellcheck disable=SC2046
    pip_install "$1" --no-deps $(grep -oE '^(torch|torchvision|torch-npu|xgrammar)==[^ ;]+' requirements-npu.txt)
    "$1/bin/python" launch/torch_without_cuda.py
}

# ENVIRONMENT REQUIREMENTS: as `prepare`; .venv-npu also gets what needs neither CANN nor an index of its own.
prepare_whole() {
    if [[ $1 == .venv-npu ]]; then
        bash launch/install_npu.sh wheels vllm vllm-ascend >/dev/null
    else
        prepare "$1" "$2"
    fi
}

add() ( # ENVIRONMENT REQUIREMENTS [pip's options]: installs more into a prepared environment
    flock 9 2>/dev/null || true
    if installed "$1" "${2%.txt}" "$2"; then return; fi
    echo "adding $2 to $1" >&2
    pip_install "$1" -r "$2" "${@:3}"
    stamp "$2" >"$1/installed-${2%.txt}"
) 9>"build/$1.lock"

has() { # ENVIRONMENT PACKAGE [VERSION]
    [[ -x $1/bin/python ]] && "$1/bin/python" -c 'import importlib.metadata as packages, sys
name, wanted = sys.argv[1:]
try:
    sys.exit(wanted not in ("", packages.version(name)))
except packages.PackageNotFoundError:
    sys.exit(1)' "$2" "${3:-}"
}

# ENVIRONMENT REQUIREMENTS: sets $python to the interpreter that runs the project: NPU_VLRL_PYTHON as it is, with
# nothing installed into it (a container image's own, say), or that of an environment prepared here.
choose_python() {
    python=${NPU_VLRL_PYTHON:-$1/bin/python}
    if [[ -z ${NPU_VLRL_PYTHON:-} ]]; then
        prepare_whole "$1" "$2"
    elif ! "$python" --version >/dev/null 2>&1; then
        fail "NPU_VLRL_PYTHON=$python is not a Python; name one that has the packages of $2"
    fi
}

# Sets what the platform recommends (python -m npu_vlrl.hardware environment shows it, with reasons); what is set
# already stays. Without the hardware its message says what is missing.
apply_launch_settings() {
    local settings
    settings=$("$python" -m npu_vlrl.hardware environment) || exit 2
    eval "$settings"
}

count() { # NAME VALUE [LEAST]: VALUE must be a whole number
    if ! [[ $2 =~ ^[0-9]{1,6}$ ]] || ((10#$2 < ${3:-0})); then
        fail "$1=$2 is not a whole number of at least ${3:-0}"
    fi
}

has_npu() {
    npu-smi info >/dev/null 2>&1 || compgen -G '/dev/davinci[0-9]*' >/dev/null
}

find_cann() { # prints the path of CANN's set_env.sh, or nothing
    local file
    for file in ${ASCEND_HOME_PATH:+"$ASCEND_HOME_PATH/set_env.sh" "$ASCEND_HOME_PATH/../set_env.sh"} \
        ~/Ascend/{cann,ascend-toolkit}/set_env.sh /usr/local/Ascend/{cann,ascend-toolkit}/set_env.sh; do
        if [[ -f $file ]]; then
            echo "$file"
            return
        fi
    done
}

source_cann() { # CANN's libraries and tools enter the environment, and those of its transformer library
    local found root file
    found=$(find_cann)
    [[ -n $found ]] || fail "there is an NPU but no CANN: no set_env.sh in ASCEND_HOME_PATH, ~/Ascend or \
/usr/local/Ascend. Install CANN's toolkit and kernels, or set ASCEND_HOME_PATH to the folder they are in"
    root=$(dirname "$found")/..
    echo "CANN: $found" >&2
    set +eu # they read variables that may be unset
    for file in "$found" "$root/nnal/atb/set_env.sh" "$root/../nnal/atb/set_env.sh"; do
        # shellcheck disable=SC1090
        [[ ! -f $file ]] || . "$file"
    done
    set -eu
}

# PROCESSES ARGUMENT...: trains with the given arguments. Without a word about the run folder it is a new one.
train() {
    local processes=${NPU_VLRL_PROCESSES:-$1} config='' previous='' argument folder again='' usual=()
    shift
    for argument in "$@"; do # of several configurations the first, which says the task, names the run
        [[ -n $config || $previous != --config ]] || config=$argument
        [[ -n $config || $argument != --config=* ]] || config=${argument#*=}
        previous=$argument
    done
    if [[ -z $config ]]; then
        config=configs/photo_tiny.yaml
        usual=(--config "$config")
    fi
    case " $* " in
    *' --run-dir'* | *' run.dir='* | *' run.if_exists='*) ;;
    *)
        folder=runs/$(basename "$config" .yaml)-$(date +%Y%m%d-%H%M%S)
        set -- --run-dir "$folder" "$@"
        again="bash launch/${0##*/}$(printf ' %q' "$@") run.if_exists=resume"
        ;;
    esac
    start "$again" "$processes" "${usual[@]}" "$@"
}

# AGAIN PROCESSES ARGUMENT...: one process is learner and engine in one; of more, on one machine or on several, the first
# is the learner and each other one an engine on a device of its own. With train.learners=all each is both. With
# ray.processes=N the one that is started here has Ray start N. AGAIN is the command that continues the run; it is told
# when nothing here stands against a start.
start() {
    local again=$1 processes=$2 nodes=${NNODES:-1} rendezvous=(--standalone) resolved
    shift 2
    count NPU_VLRL_PROCESSES "$processes" 1
    count NNODES "$nodes" 1
    processes=$((10#$processes)) nodes=$((10#$nodes)) # 08 would be a bad octal number below
    ((nodes == 1)) || meet "$nodes"
    resolved=$("$python" -m npu_vlrl config "$@") || exit # bad input ends here: torchrun would hide message and code
    if [[ $resolved =~ $'\nray:\n  processes: '[1-9] ]]; then # Ray starts the processes, from this one
        ((nodes == 1)) || fail "NNODES=$nodes and ray.processes exclude each other: Ray knows the machines"
        processes=1
    fi
    if [[ ! -f runs/data/geo3k/test.parquet ]]; then # the last of its files
        "$python" -m npu_vlrl data geo3k --out runs/data/geo3k >&2
    fi
    [[ -z $again || ${NODE_RANK:-0} != 0 ]] || echo "if it is stopped, it goes on with: $again" >&2
    if ((processes * nodes == 1)); then
        exec "$python" -m npu_vlrl train "$@"
    fi
    : "${OMP_NUM_THREADS:=1}" # what torchrun chooses too, with a warning
    export OMP_NUM_THREADS
    exec "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$processes" -m npu_vlrl train "$@"
}

meet() { # MACHINES: sets $rendezvous, for torchrun, to where they meet: at the first
    [[ -n ${MASTER_ADDR:-} && -n ${NODE_RANK:-} ]] ||
        fail "NNODES=$1 also needs MASTER_ADDR, the first machine's address, and NODE_RANK, this machine's number from \
0 to $(($1 - 1)); start the script on every machine"
    count NODE_RANK "$NODE_RANK"
    # torchrun would wait for other machines, and say nothing
    ((10#$NODE_RANK < $1)) || fail "NODE_RANK=$NODE_RANK is not below NNODES=$1: the machines are numbered from 0 to \
$(($1 - 1)); correct one of the two"
    "$python" -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' "$MASTER_ADDR" 2>/dev/null ||
        fail "MASTER_ADDR=$MASTER_ADDR is no address that this machine can resolve; set it to the first machine's \
address in the network that all machines are in, such as 10.0.0.1"
    rendezvous=(--nnodes "$1" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
}
