#!/bin/sh
# Builds the images of the gateway and of the sandbox server with buildah, and exports them as archives. Needs root.
#
# usage: deploy/images/build.sh          (or `make images`, which also tests them)
#
# Result: localhost/fumehood-gateway:VERSION and localhost/fumehood-sandbox:VERSION in buildah's storage, and as
# .images/gateway.tar and .images/sandbox.tar for `ctr -n k8s.io images import`, `docker load` and `podman load`.
#
# variables:
#   BASE            base image; without it docker.io/library/python:3.13-slim, or, where that registry is not in reach,
#                   a Debian trixie made by debootstrap (localhost/fumehood-base:trixie, kept for the next time)
#   REBUILD_BASE=1  make that Debian again, with today's security updates
#   DEBIAN_MIRROR, DEBIAN_SECURITY_MIRROR   where it comes from
#   UV_DEFAULT_INDEX or PIP_INDEX_URL       package index for the build; or whole configuration files of uv and pip:
#   UV_CONFIG_FILE, PIP_CONFIG_FILE         none of it is in the images, which is checked
#   SSL_CERT_FILE   certificate authorities to trust during the build (the host's)
#   TARGETS         what to build: `gateway sandbox`
#   BUILDAH_ISOLATION, STORAGE_DRIVER       as buildah reads them; `chroot`, and `vfs` where overlays do not work
set -eu
umask 022

cd "$(dirname "$0")/../.."
official=docker.io/library/python:3.13-slim
debian=localhost/fumehood-base:trixie
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
security_mirror=${DEBIAN_SECURITY_MIRROR:-http://deb.debian.org/debian-security}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/fumehood/__init__.py)
output=.images

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# --- Settings of the caller, as files that are mounted during the build ---------------------------------------------

# Neither this line nor the index may be found in an image, also not in layers of an earlier build.
canary=fumehood-build-canary
write_secrets() {
    index=${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-${PIP_INDEX_URL:-}}}
    if [ -n "${PIP_CONFIG_FILE:-}" ]; then
        cat "$PIP_CONFIG_FILE" >"$secrets/pip.conf"
    elif [ -n "$index" ]; then
        printf '[global]\nindex-url = %s\n' "$index" >"$secrets/pip.conf"
    fi
    if [ -n "${UV_CONFIG_FILE:-}" ]; then
        cat "$UV_CONFIG_FILE" >"$secrets/uv.toml"
    elif [ -n "$index" ]; then
        printf '[[index]]\nurl = "%s"\ndefault = true\n' "$index" >"$secrets/uv.toml"
    fi
    printf '\n# %s\n' "$canary" >>"$secrets/pip.conf"
    printf '\n# %s\n' "$canary" >>"$secrets/uv.toml"
    authorities=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
    if [ -r "$authorities" ]; then
        cat "$authorities" >"$secrets/ca-certificates.crt"
    fi
}

# --- The base -------------------------------------------------------------------------------------------------------

has_image() { buildah inspect --type image "$1" >/dev/null 2>&1; }

choose_base() {
    if [ -n "${BASE:-}" ]; then
        return 0
    fi
    if has_image "$official" || timeout 120 buildah pull --quiet "$official" >/dev/null 2>&1; then
        BASE=$official
        return 0
    fi
    BASE=$debian
    if [ -z "${REBUILD_BASE:-}" ] && has_image "$debian"; then
        return 0
    fi
    say "$official is not in reach: making Debian trixie from $mirror"
    make_debian
}

make_debian() {
    command -v debootstrap >/dev/null || die "debootstrap is missing (apt-get install debootstrap), or set BASE"
    root=$work/debian
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv trixie "$root" "$mirror" >"$work/debootstrap.log" 2>&1 || {
        tail -n 5 "$work/debootstrap.log" >&2
        die "debootstrap failed"
    }
    {
        printf 'deb %s trixie main\n' "$mirror"
        printf 'deb %s trixie-updates main\n' "$mirror"
        printf 'deb %s trixie-security main\n' "$security_mirror"
    } >"$root/etc/apt/sources.list"
    in_debian apt-get update -qq
    in_debian apt-get upgrade -qq --yes
    in_debian apt-get clean
    # The sources are of this build; documentation, translations and lists are for people.
    rm -rf "$root/etc/apt/sources.list" "$root/var/lib/apt/lists" "$root/var/log" "$root/var/cache" \
        "$root/usr/share/doc" "$root/usr/share/man" "$root/usr/share/info" "$root/usr/share/locale"
    install -d "$root/var/log" "$root/var/cache" "$root/var/lib/apt/lists/partial"
    container=$(buildah from scratch)
    tar --directory "$root" --create --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' . >"$work/debian.tar"
    buildah add --quiet "$container" "$work/debian.tar" / >/dev/null
    buildah commit --quiet --rm "$container" "$debian" >/dev/null
    rm -rf "$root" "$work/debian.tar"
}

in_debian() {
    DEBIAN_FRONTEND=noninteractive LC_ALL=C chroot "$root" "$@" >"$work/chroot.log" 2>&1 || {
        tail -n 5 "$work/chroot.log" >&2
        die "$* failed in the new Debian"
    }
}

# --- The images -----------------------------------------------------------------------------------------------------

build_image() {
    target=$1
    image=localhost/fumehood-$target:$version
    say "building $image on $BASE"
    set -- --secret id=pip.conf,src="$secrets/pip.conf" --secret id=uv.toml,src="$secrets/uv.toml"
    if [ -e "$secrets/ca-certificates.crt" ]; then
        set -- "$@" --secret id=ca-certificates.crt,src="$secrets/ca-certificates.crt"
    fi
    # Docker's format, because that of OCI has no HEALTHCHECK.
    buildah bud --quiet --format docker --layers --build-arg BASE="$BASE" --build-arg VERSION="$version" "$@" \
        --target "$target" --file deploy/images/Containerfile --tag "$image" . >/dev/null
    rm -f "$output/$target.tar"
    buildah push --quiet "$image" "docker-archive:$output/$target.tar:$image" >/dev/null
    # The archive holds layers and configuration uncompressed.
    if grep --quiet --binary-files=text --fixed-strings --regexp "$canary" ${index:+--regexp "$index"} "$output/$target.tar"; then
        rm -f "$output/$target.tar"
        die "$image contains the settings of pip or uv that the build was given"
    fi
    say "$image: $(du -m "$output/$target.tar" | cut -f1) MB, $output/$target.tar"
}

[ "$(id -u)" = 0 ] || die "building images with buildah, and a Debian with debootstrap, needs root: sudo make images"
command -v buildah >/dev/null || die "buildah is missing: apt-get install buildah debootstrap"
[ -n "$version" ] || die "src/fumehood/__init__.py has no __version__"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
secrets=$work/secrets
mkdir -m 700 "$secrets"
mkdir -p "$output"
BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
export BUILDAH_ISOLATION
if [ -z "${STORAGE_DRIVER:-}" ] && ! buildah info >/dev/null 2>&1; then
    STORAGE_DRIVER=vfs
    export STORAGE_DRIVER
fi
write_secrets
choose_base
for target in ${TARGETS:-gateway sandbox}; do
    build_image "$target"
done
