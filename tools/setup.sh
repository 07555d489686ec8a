#!/bin/sh
# Makes .venv: finds or installs uv, finds a Python >= 3.12, then `uv sync` from the lock file.
#
# usage: tools/setup.sh            make or refresh .venv
#        tools/setup.sh for 3.13   make or refresh .venv-3.13, with that version of Python
#        tools/setup.sh find 3.13  print the path of that version of Python, or fail
#        tools/setup.sh uv ARGS    run uv with ARGS
#
# PYTHON=/path/to/python chooses the interpreter. Nothing outside the working tree is changed, except for uv's
# cache and, if no suitable Python is installed, the one that uv downloads.
set -eu
# As root, sandboxes run as other users, who have to read what is installed here.
umask 022

cd "$(dirname "$0")/.."
root=$(pwd)
oldest_minor=12
oldest_uv_minor=8 # of 0.x: the first that was seen to understand uv.lock and the options below
pins=tools/uv-requirements.txt
pinned_only="--quiet --no-deps --only-binary :all: --require-hashes --requirement $pins"

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

version_of_uv() { "$1" --version 2>/dev/null | awk '{print $2}'; }

# Whether the uv of the caller is new enough; older ones on PATH are passed over.
usable_uv() {
    version=$(version_of_uv "$1") || return 1
    major=${version%%.*}
    rest=${version#*.}
    minor=${rest%%.*}
    case "$major$minor" in '' | *[!0-9]*) return 1 ;; esac
    [ "$major" -gt 0 ] || [ "$minor" -ge "$oldest_uv_minor" ]
}

pinned_version() { sed -n 's/^uv==\([0-9.]*\).*/\1/p' "$pins"; }

# Install the pinned uv with the Python $1: a wheel with a hash of the list, or nothing.
install_uv_with() {
    rm -rf .uv
    if "$1" -m pip --version >/dev/null 2>&1; then
        PIP_ROOT_USER_ACTION=ignore "$1" -m pip install $pinned_only --target .uv >&2
    else # Debian's python3 without python3-pip may have ensurepip
        "$1" -m venv .uv 2>/dev/null && .uv/bin/python -m pip install $pinned_only >&2
    fi
}

# Any Python will do to install uv.
install_uv() {
    for candidate in $(all_on_path python3) $(all_on_path python) "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/*/bin/python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || continue
        say "no uv 0.$oldest_uv_minor or later found; installing uv $(pinned_version) into .uv/ with $candidate"
        if install_uv_with "$candidate"; then
            return 0
        fi
    done
    rm -rf .uv
    return 1
}

find_uv() {
    for candidate in $(all_on_path uv) "${HOME:-/nonexistent}/.local/bin/uv"; do
        if usable_uv "$candidate"; then
            uv=$candidate
            return 0
        fi
    done
    uv=$root/.uv/bin/uv
    if [ "$(version_of_uv "$uv")" = "$(pinned_version)" ]; then
        return 0
    fi
    install_uv || die "there is no uv 0.$oldest_uv_minor or later, and uv $(pinned_version) could not be installed" \
        "with pip (above is why; it takes only the files whose hashes $pins lists)." \
        "Install uv yourself and try again: https://docs.astral.sh/uv/"
}

# Prints the interpreter itself, not the shim or link by which it was found. $2: this minor version and no other.
suitable() {
    "$1" -c "
import sys
minor = sys.version_info.minor
fits = minor == int('${2:-0}') if '${2:-}' else minor >= $oldest_minor
fits = fits and sys.implementation.name == 'cpython' and sys.version_info.major == 3
print(sys.executable) if fits else sys.exit(1)" 2>/dev/null
}

version_of_python() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

# Candidates, of the minor versions given.
pythons() {
    for minor in "$@"; do
        all_on_path "python3.$minor"
        for directory in "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.$minor.*; do
            printf '%s\n' "$directory/bin/python3.$minor"
        done
    done
    all_on_path python3
    all_on_path python
}

# A Python of the minor version $1, or any that will do; without downloading one.
find_installed_python() {
    for candidate in $(if [ -n "$1" ]; then pythons "$1"; else pythons 12 13 14; fi); do
        case $candidate in "$root"/*) continue ;; esac
        if python=$(suitable "$candidate" "$1"); then
            return 0
        fi
    done
    if [ -n "$1" ]; then request=3.$1; else request=">=3.$oldest_minor"; fi
    python=$("$uv" python find --managed-python --no-python-downloads "$request" 2>/dev/null)
}

# What users of an older Python are told.
advice="Fumehood needs Python 3.$oldest_minor or later. uv gets one for you, beside the one you have and without root:
    uv python install 3.$oldest_minor                                     then run this again, or, without a clone,
    uv tool install --python 3.$oldest_minor 'fumehood[all]'              the command fumehood
    uv venv --python 3.$oldest_minor && uv pip install 'fumehood[all]'    an environment of your own
Or name an interpreter: make test PYTHON=/path/to/python3.$oldest_minor"

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        python=$(suitable "$PYTHON") ||
            die "PYTHON=$PYTHON is $(version_of_python "$PYTHON" || echo 'no Python that runs'). $advice"
        return 0
    fi
    # An environment that works is kept, so that a newly installed Python does not rebuild it.
    if suitable .venv/bin/python >/dev/null; then
        python=$root/.venv/bin/python
        return 0
    fi
    if find_installed_python ''; then
        return 0
    fi
    for candidate in $(all_on_path python3); do
        found=$(version_of_python "$candidate") && say "$candidate is Python $found, which is too old for Fumehood"
    done
    say "no Python 3.$oldest_minor or later found; uv downloads one for this (nothing of the system is changed)"
    if "$uv" python install "3.$oldest_minor" >&2 &&
        python=$("$uv" python find --managed-python "3.$oldest_minor" 2>/dev/null); then
        return 0
    fi
    die "no Python 3.$oldest_minor or later was found on PATH, in pyenv or among uv's, and none could be downloaded." \
        "$advice"
}

# Trust whom the machine trusts, as pip and curl do; uv's own list knows no company's certificate authority.
if [ -r /etc/ssl/certs/ca-certificates.crt ] || [ -r /etc/pki/tls/certs/ca-bundle.crt ]; then
    UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-${UV_NATIVE_TLS:-true}}
    export UV_SYSTEM_CERTS
fi

find_uv
environment=.venv
case "${1:-}" in
uv)
    shift
    exec "$uv" "$@"
    ;;
for | find)
    minor=${2#3.}
    case "$minor" in '' | *[!0-9]*) die "usage: tools/setup.sh $1 3.13" ;; esac
    find_installed_python "$minor" ||
        die "no Python 3.$minor was found on PATH, in pyenv or among uv's. Install one: tools/setup.sh uv python install 3.$minor"
    if [ "$1" = find ]; then
        printf '%s\n' "$python"
        exit 0
    fi
    environment=.venv-3.$minor
    ;;
'') ;;
*) die "unknown argument $1; the head of tools/setup.sh lists what there is" ;;
esac
# Scripts in an environment name their interpreter by its full path, so it does not survive being moved.
if [ -e "$environment/.synced" ] && [ "$(cat "$environment/.synced")" != "$root" ]; then
    rm -rf "$environment"
fi
[ "$environment" != .venv ] || find_python
UV_PROJECT_ENVIRONMENT=$environment "$uv" sync --quiet --frozen --all-extras --python "$python"
# The Makefile compares this with where it runs.
printf '%s' "$root" >"$environment/.synced"
