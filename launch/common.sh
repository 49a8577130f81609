# Sourced by the other launch scripts: makes a virtual environment once, and again when its requirements change.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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
    pip_install "$1" -r "$2"
    pip_install "$1" --no-deps -e .
    stamp "$2" pyproject.toml >"$1/installed-base"
) 9<launch/common.sh

add() ( # ENVIRONMENT REQUIREMENTS [pip's options]: installs more into a prepared environment
    flock 9 2>/dev/null || true
    if installed "$1" "${2%.txt}" "$2"; then return; fi
    echo "adding $2 to $1" >&2
    pip_install "$1" -r "$2" "${@:3}"
    stamp "$2" >"$1/installed-${2%.txt}"
) 9<launch/common.sh

# ENVIRONMENT ARGUMENT...: trains with the given arguments. Without a word about the run folder it is a new one.
train() {
    local python="$1/bin/python" config=configs/photo_tiny.yaml previous='' argument folder
    shift
    for argument in "$@"; do
        [[ $previous != --config ]] || config=$argument
        [[ $argument != --config=* ]] || config=${argument#*=}
        previous=$argument
    done
    case " $* " in
    *' --run-dir'* | *' run.dir='* | *' run.if_exists='*) ;;
    *)
        folder=runs/$(basename "$config" .yaml)-$(date +%Y%m%d-%H%M%S)
        set -- --run-dir "$folder" "$@"
        echo "if it is stopped, it goes on with: bash launch/${0##*/}$(printf ' %q' "$@") run.if_exists=resume" >&2
        ;;
    esac
    if [[ ! -f runs/data/geo3k/test.parquet ]]; then # the last of its files
        "$python" -m npu_vlrl data geo3k --out runs/data/geo3k >&2
    fi
    exec "$python" -m npu_vlrl train --config configs/photo_tiny.yaml "$@"
}
