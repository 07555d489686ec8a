#!/bin/sh
# Makes .venv: finds or installs uv, finds a Python >= 3.12, then `uv sync` from the lock file.
#
# usage: tools/setup.sh          make or refresh .venv
#        tools/setup.sh uv ARGS  run uv with ARGS
#
# PYTHON=/path/to/python chooses the interpreter. Nothing outside the working tree is changed, except for uv's
# cache and, if no suitable Python is installed, the one that uv downloads.
set -eu
# As root, sandboxes run as other users, who have to read what is installed here.
umask 022

cd "$(dirname "$0")/.."
root=$(pwd)
oldest_minor=12

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# Every file NAME on PATH, one a line; the first is not always one that works (pyenv's shims, for one).
all_on_path() {
    (
        IFS=:
        for directory in $PATH; do
            [ -x "$directory/$1" ] && [ ! -d "$directory/$1" ] && printf '%s\n' "$directory/$1"
        done
        true
    )
}

# A uv that knows dependency groups; older ones on PATH are passed over.
usable_uv() {
    version=$("$1" --version 2>/dev/null | awk '{print $2}') || return 1
    major=${version%%.*}
    rest=${version#*.}
    minor=${rest%%.*}
    case "$major$minor" in '' | *[!0-9]*) return 1 ;; esac
    [ "$major" -gt 0 ] || [ "$minor" -ge 5 ]
}

# Any Python will do to install uv.
install_uv() {
    for python in $(all_on_path python3) $(all_on_path python) "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/*/bin/python3; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || continue
        say "uv not found; installing it into .uv/ with $python"
        rm -rf .uv
        if "$python" -m venv .uv 2>/dev/null && .uv/bin/python -m pip install --quiet uv >&2; then
            return 0
        fi
        # Debian's python3 without python3-venv has no ensurepip, but may have pip.
        rm -rf .uv
        if "$python" -m pip install --quiet --target .uv uv >&2 2>/dev/null; then
            return 0
        fi
    done
    rm -rf .uv
    return 1
}

find_uv() {
    for candidate in $(all_on_path uv) "$root/.uv/bin/uv" "${HOME:-/nonexistent}/.local/bin/uv"; do
        if usable_uv "$candidate"; then
            uv=$candidate
            return 0
        fi
    done
    install_uv || die "uv is not installed and could not be installed with pip. Install it first: https://docs.astral.sh/uv/"
    uv=$root/.uv/bin/uv
}

# Prints the interpreter itself, not the shim or link by which it was found.
suitable() {
    "$1" -c "
import sys
fits = sys.implementation.name == 'cpython' and sys.version_info >= (3, $oldest_minor)
print(sys.executable) if fits else sys.exit(1)" 2>/dev/null
}

pythons() {
    for minor in 12 13 14; do
        all_on_path "python3.$minor"
        for directory in "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.$minor.*; do
            printf '%s\n' "$directory/bin/python3.$minor"
        done
    done
    all_on_path python3
    all_on_path python
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        python=$(suitable "$PYTHON") || die "PYTHON=$PYTHON is not a CPython 3.$oldest_minor or later"
        return 0
    fi
    # An environment that works is kept, so that a newly installed Python does not rebuild it.
    if suitable .venv/bin/python >/dev/null; then
        python=$root/.venv/bin/python
        return 0
    fi
    for candidate in $(pythons); do
        case $candidate in "$root"/*) continue ;; esac
        if python=$(suitable "$candidate"); then
            return 0
        fi
    done
    if python=$("$uv" python find --managed-python --no-python-downloads ">=3.$oldest_minor" 2>/dev/null); then
        return 0
    fi
    say "no Python 3.$oldest_minor or later found; asking uv to download one"
    if "$uv" python install "3.$oldest_minor" >&2 &&
        python=$("$uv" python find --managed-python "3.$oldest_minor" 2>/dev/null); then
        return 0
    fi
    die "Fumehood needs Python 3.$oldest_minor or later: none was found on PATH, in pyenv or among uv's, and none could" \
        "be downloaded. Install one, or name it: make test PYTHON=/path/to/python3.$oldest_minor"
}

# Trust whom the machine trusts, as pip and curl do; uv's own list knows no company's certificate authority.
if [ -r /etc/ssl/certs/ca-certificates.crt ] || [ -r /etc/pki/tls/certs/ca-bundle.crt ]; then
    UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-${UV_NATIVE_TLS:-true}}
    export UV_SYSTEM_CERTS
fi

find_uv
if [ "${1:-}" = uv ]; then
    shift
    exec "$uv" "$@"
fi
# Scripts in an environment name their interpreter by its full path, so it does not survive being moved.
if [ -e .venv/.synced ] && [ "$(cat .venv/.synced)" != "$root" ]; then
    rm -rf .venv
fi
find_python
"$uv" sync --quiet --frozen --all-extras --python "$python"
# The Makefile compares this with where it runs.
printf '%s' "$root" >.venv/.synced
