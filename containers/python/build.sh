#!/usr/bin/env bash
# Builds a Python that runs from any folder of any x86_64 Linux with glibc >= 2.31.
#   sudo containers/python/build.sh [OUT.tar]      default: only into the cache; prints the file
# Debian's source package of Python (trixie: 3.13, another minor than the images', so that neither
# side can come to rest on the other) with Debian's backported fixes, built in a Debian 11 root,
# whose glibc is 2.31. The libraries that a login node may lack lie beside it and are found by their
# place relative to it, also against LD_LIBRARY_PATH (DT_RPATH, not DT_RUNPATH). About 3 minutes.
#   KIMI_EAGLE_DEBIAN   the mirror (default http://deb.debian.org/debian)
#   KIMI_EAGLE_DEBIAN_OLD   that of Debian 11 (default: the same, then http://archive.debian.org/debian)
#   KIMI_EAGLE_DEBIAN_SECURITY   that of its security updates (default .../debian-security)
#   KIMI_EAGLE_CACHE    where built ones are kept (default ~/.cache/kimi-eagle)
#   TMPDIR              room for the root, 1 GB on a file system with programs and devices
set -euo pipefail
source=python3.13 minor=3.13 release=trixie old=bullseye
mirror=${KIMI_EAGLE_DEBIAN:-http://deb.debian.org/debian}
read -ra old_mirrors <<<"${KIMI_EAGLE_DEBIAN_OLD:-$mirror http://archive.debian.org/debian}"
security=${KIMI_EAGLE_DEBIAN_SECURITY:-${mirror%/}-security}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
include=gcc,libc6-dev,make,patch,patchelf,pkg-config,xz-utils,zlib1g-dev,libssl-dev,libffi-dev
include+=,libsqlite3-dev,libbz2-dev,liblzma-dev,libstdc++6
cache=${KIMI_EAGLE_CACHE:-$HOME/.cache/kimi-eagle}/python
me=$(realpath "$0") inside=$(dirname "$(realpath "$0")")/inside.sh out=${1:+$(realpath -m "$1")}
umask 022
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin

say() { echo "python: $*" >&2; }
stop() { echo "python: error: $*" >&2; exit 1; }
quietly() { # COMMAND...: its output only when it fails
    "$@" >"$work/log" 2>&1 || { tail -5 "$work/log" >&2; stop "failed: ${*:1:4}"; }
}
hand_over() { # FILE
    touch "$1"
    find "$cache" -name '*.tar' -mtime +60 -delete
    if [ -n "$out" ]; then cp "$1" "$out.tmp" && mv "$out.tmp" "$out"; fi
    echo "${out:-$1}"
}
view() { # APT-GET ARGUMENTS...: the release's sources, apart from the machine's own package lists
    apt-get -qq -o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$work/apt/lists" -o Dir::Cache="$work/apt/cache" \
        -o APT::Sandbox::User=root "$@"
}
source_now() { # "URI NAME SIZE SHA256:..." a line; nothing where no mirror answers
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
    echo "deb-src [signed-by=$keyring] $mirror $release main" >"$work/apt/sources.list"
    view update >"$work/log" 2>&1 && view source --print-uris "$source" 2>>"$work/log"
}

[ "$(uname -sm)" = "Linux x86_64" ] || stop "this is $(uname -sm); built is for Linux x86_64"
mkdir -p "$cache"
exec 9>"$cache/build.busy"
flock 9 # a second one waits, and takes what this one built
work=$(mktemp -d "${TMPDIR:-/var/tmp}/kimi-eagle-python.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
recipe=$(echo "$include $old" | cat - "$inside" | sha256sum | cut -c1-16)
if uris=$(source_now) && [ -n "$uris" ]; then
    key=$recipe-$(grep -o 'SHA256:[0-9a-f]*' <<<"$uris" | sort | sha256sum | cut -c1-16)
    [ ! -s "$cache/$key.tar" ] || { hand_over "$cache/$key.tar"; exit; }
else
    newest=$(find "$cache" -name "$recipe-*.tar" -printf '%T@ %p\n' | sort -n | sed -n '$s/[^ ]* //p')
    [ -n "$newest" ] || { tail -3 "$work/log" >&2; stop "no source of $source from $mirror;" \
        "fix: KIMI_EAGLE_DEBIAN=URL of a mirror, and the package debian-archive-keyring"; }
    say "no mirror answers; taking the last one built"
    hand_over "$newest"
    exit
fi
[ "$(id -u)" = 0 ] || stop "a Debian 11 root is made by root only; fix:" \
    "sudo $me FILE.tar, here or elsewhere, and bundle.py --python FILE.tar"
command -v debootstrap >/dev/null || stop "debootstrap is missing; fix: apt-get install debootstrap"

root=$work/root made=0
for from in "${old_mirrors[@]}"; do
    say "a Debian 11 root from $from"
    rm -rf --one-file-system "$root"
    debootstrap --variant=minbase --keyring="$keyring" --include="$include" "$old" "$root" "$from" \
        >"$work/log" 2>&1 && made=1 && break
    tail -3 "$work/log" >&2
done
[ "$made" = 1 ] || stop "no Debian 11 root; fix: KIMI_EAGLE_DEBIAN_OLD=URL of a mirror"

echo "deb $security $old-security main" >"$root/etc/apt/sources.list.d/security.list"
chroot "$root" sh -c 'apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qqy upgrade' \
    >"$work/log" 2>&1 || say "no security updates of Debian 11 from $security"
mkdir -p "$root/build" "$work/source"
(cd "$work/source" && quietly view source --download-only "$source")
dsc=$(cd "$work/source" && echo *.dsc)
say "building ${dsc%.dsc}"
tar -xf "$work/source"/*.orig.tar.xz -C "$root/build" --no-same-owner
tar -xf "$work/source"/*.debian.tar.xz -C "$root/build" --no-same-owner
mv "$root"/build/Python-* "$root/build/python"
cp "$inside" "$root/build/build.sh"
quietly chroot "$root" bash /build/build.sh
{ echo "${dsc%.dsc}"; grep -o 'SHA256:[0-9a-f]*' <<<"$uris"; } >>"$root/build/out/python/share/source.txt"

tar -C "$root/build/out/python" --sort=name --owner=0 --group=0 --numeric-owner --format=gnu \
    --mode=u+w,go-w,a+rX --mtime=@1000000000 -cf "$cache/$key.tmp" .
mv "$cache/$key.tmp" "$cache/$key.tar"
say "built in $SECONDS s: Python $minor, $(($(stat -c %s "$cache/$key.tar") >> 20)) MiB"
hand_over "$cache/$key.tar"
