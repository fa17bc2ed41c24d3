#!/usr/bin/env bash
# Makes .venv from containers/cpu.lock, installs this package into it (editable), fetches the
# small real model and makes the toy Kimi. What `make setup` runs. Safe to repeat: each step is
# skipped when it is done.
#   PYTHON        the CPython 3.11 to use (default: python3.11, then python3)
#   TORCH_INDEX   further package index for torch's CPU build, where pip's own has only CUDA builds
#   KIMI_EAGLE_CACHE  where the models go (default ~/.cache/kimi-eagle)
set -euo pipefail
cd "$(dirname "$0")/.."
exec 9<containers/setup.sh
flock 9 # one set-up at a time in this checkout

say() { echo "setup: $*"; }
stop() { echo "setup: error: $*" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] ||
    stop "this is $(uname -sm); the lock is for Linux x86_64 (see README.md, 'Other machines')"

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3; do
        "$candidate" -c 'import sys; sys.exit(sys.implementation.name != "cpython" or
            sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
    done
    return 1
}

system_packages() { # PACKAGE...: apt-get as root; for a user one line to type
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing system packages: $*"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"; } \
            >"$log" 2>&1 || { tail -5 "$log" >&2; stop "apt-get install $* failed"; }
    else
        stop "missing system packages; fix: sudo apt-get install $*"
    fi
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

python=$(find_python) || stop "no CPython 3.11 found (this is what the lock is for);" \
    "fix: install it and type: make setup PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null || system_packages python3.11-venv
ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || system_packages libnuma1 # vLLM's CPU kernels

venv=$PWD/.venv
stamp=$venv/.kimi-eagle-lock
want_lock="$venv $("$python" -V) $(sha256sum <containers/cpu.lock)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$want_lock" ]; then
    # A moved or half-made environment of our own is made anew; pip repairs everything else.
    if [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        rm -rf "$venv"
    elif [ -s "$stamp" ] && [ "$(cut -d' ' -f1 "$stamp")" != "$venv" ]; then
        rm -rf "$venv"
    fi
    rm -f "$stamp"
    if [ ! -e "$venv" ]; then
        say "making .venv ($("$python" -V))"
        "$python" -m venv "$venv"
    fi
    say "installing $(grep -c '^[a-z0-9].*==' containers/cpu.lock) packages of containers/cpu.lock" \
        "into .venv (4 GB, 1 to 3 minutes)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        --require-hashes ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -r containers/cpu.lock >"$log" 2>&1 || {
        grep -v '^WARNING' "$log" | tail -8 >&2
        grep -q torch "$log" && [ -z "${TORCH_INDEX:-}" ] && stop "if it is torch that was not" \
            "found: its CPU build is on PyTorch's own index, see README.md, 'Other machines'"
        stop "pip could not install containers/cpu.lock"
    }
    echo "$want_lock" >"$stamp"
fi

stamp=$venv/.kimi-eagle-package
want_package="$venv $(cat pyproject.toml src/kimi_eagle/__init__.py | sha256sum) $want_lock"
if [ "$(cat "$stamp" 2>/dev/null)" != "$want_package" ] || [ ! -x "$venv/bin/kimi-eagle" ]; then
    say "installing kimi-eagle (editable)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        --no-build-isolation -e . >"$log" 2>&1 || {
        tail -8 "$log" >&2
        stop "pip could not install this package"
    }
    echo "$want_package" >"$stamp"
fi

"$venv/bin/python" -m kimi_eagle.demo_model
"$venv/bin/python" -m kimi_eagle.toy
say "ready"
