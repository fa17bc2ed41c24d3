#!/usr/bin/env bash
# Makes cpu.lock, cuda.lock and base.lock (hashed, for pip) from *.in and pyproject.toml.
# Reads the package index that uv is configured with; needs `uv`; writes only these locks.
# Versions already in a lock are kept where they still fit: delete a lock to renew everything.
set -euo pipefail
cd "$(dirname "$0")"
UV=${UV:-uv}
command -v "$UV" >/dev/null || { echo "lock.sh: uv not found; fix: pip install uv" >&2; exit 1; }

# torch 2.13.0+cpu for CPython 3.11 on x86_64 Linux, as PyTorch publishes it. Only this hash may be
# in the CPU lock: pip prefers a file whose hash is allowed, so with the CUDA build's hash beside
# it pip would take the CUDA build, which cannot be imported without CUDA's libraries.
TORCH_CPU_SHA256=6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

compile() { # OUT PYTHON ARGS...: resolve for x86_64 Linux, with hashes
    local out=$1 python=$2
    shift 2
    "$UV" pip compile --quiet --no-header --generate-hashes --python-version "$python" \
        --python-platform x86_64-manylinux_2_28 -o "$out" "$@"
}

seed() { # LOCK OUT: the present versions as preferences, if there is a lock
    if [ -f "$1" ]; then cp "$1" "$2"; fi
}

seed cpu.lock "$tmp/cpu"
compile "$tmp/cpu" 3.11 ../pyproject.toml --extra cpu --extra test cpu.in \
    --override cpu-overrides.txt
python3 trim_lock.py "$tmp/cpu" cpu.lock --lock cpu --torch-sha256 "$TORCH_CPU_SHA256"

# CUDA: first everything together, so that versions agree with vllm's own demands; then the closure
# of our additions alone, held to those versions, without what the base image has.
seed cuda.lock "$tmp/all"
compile "$tmp/all" 3.12 cuda.in <(echo vllm==0.31.0)
grep -E '^[a-z0-9][^ ]*==' "$tmp/all" | sed 's/ .*//' >"$tmp/constraints"
compile "$tmp/cuda" 3.12 cuda.in --constraint "$tmp/constraints" --override cuda-overrides.txt
python3 trim_lock.py "$tmp/cuda" cuda.lock --lock cuda

# The light base of a login node, for the Python that the bundle brings. It takes the versions of
# the CPU lock where they have a build for that Python.
cp cpu.lock "$tmp/base"
compile "$tmp/base" 3.13 ../pyproject.toml
python3 trim_lock.py "$tmp/base" base.lock --lock base
