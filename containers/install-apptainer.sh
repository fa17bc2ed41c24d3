#!/usr/bin/env bash
# Installs Apptainer so that users without any rights can run images (rootless, no setuid program).
#   sudo bash containers/install-apptainer.sh    installs; safe to repeat: mends what is amiss
#   containers/install-apptainer.sh --check      says what is there; exit 0: usable, 1: not
# Where the distribution offers apptainer, that is taken. Debian 12 does not: it then comes from
# Debian sid, which wants a newer libc. The machine's own libc and package sources stay untouched:
# sid is read through a private view of apt, and apptainer gets a copy of sid's libc for itself.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive PATH=$PATH:/usr/sbin:/sbin
# Whoever types this may have set them; root's TMPDIR may be closed to the user that tries it.
unset "${!APPTAINER@}" "${!SINGULARITY@}" LD_PRELOAD
[ "$(id -u)" != 0 ] || unset TMPDIR
private=/usr/lib/apptainer-libc # sid's libc and two libraries that want it
me=$(realpath "$0")

say() { echo "install-apptainer: $*"; }
stop() { echo "install-apptainer: error: $*" >&2; exit 1; }
quietly() { # COMMAND...: its output only when it fails
    "$@" >"$work/log" 2>&1 || { tail -5 "$work/log" >&2; stop "failed: $*"; }
}
find_it() { # an apptainer that starts, in PATH or where sites put it
    local program
    for program in {,/usr/local/bin/,/opt/apptainer/{,*/}bin/}apptainer singularity; do
        program=$(command -v "$program") || continue
        [[ $("$program" --version 2>&1) != "apptainer version"* ]] || { echo "$program"; return; }
    done
    return 1
}
as_user() { # COMMAND...: without rights, as whoever typed sudo or as nobody
    local uid=${SUDO_UID:-65534} gid=${SUDO_GID:-65534}
    [ "$(id -u)" = 0 ] && set -- setpriv --reuid="$uid" --regid="$gid" --clear-groups "$@"
    (cd "$work" && env -i PATH="$PATH" HOME="$work" "$@")
}
try_it() { # PROGRAM: a command in a compressed image, as a job does it; users first, then root
    command -v mksquashfs >/dev/null || { echo "mksquashfs (squashfs-tools) is missing"; return 1; }
    mkdir -p "$work/root"/{dev,etc,proc,sys,tmp,var/tmp,root}
    cp -L --parents $(ldd /bin/true | grep -o '/[^ ]*') /bin/true "$work/root"
    chmod -R a+rX "$work"
    mksquashfs "$work/root" "$work/image" -quiet -no-progress >/dev/null && chmod a+r "$work/image"
    as_user "$1" -q exec --no-home "$work/image" /bin/true || return
    [ "$(id -u)" != 0 ] || "$1" -q exec --no-home "$work/image" /bin/true
}
check() {
    local program user start why
    user=${SUDO_USER:-$(id -un)}
    program=$(find_it) || { say "apptainer: none found; fix: sudo bash $me"; return 1; }
    say "apptainer: $("$program" --version) ($program)"
    if [ ! -c /dev/fuse ]; then say "/dev/fuse: missing"
    elif as_user test -w /dev/fuse; then say "/dev/fuse: open to users"
    else say "/dev/fuse: closed to users"; fi
    if as_user unshare --user true 2>/dev/null; then say "user namespaces: allowed"
    else say "user namespaces: refused by the kernel's settings"; fi
    if grep -qs "^\($user\|$(id -u "$user")\):" /etc/subuid; then say "subuid: $user has a range"
    else say "subuid: none for $user (some builds without root want one, runs do not)"; fi
    start=$(date +%s%N)
    why=$(try_it "$program" 2>&1) || {
        say "rootless: does not work: $(tail -n 1 <<<"$why" | sed 's/\x1b\[[0-9;]*m//g')"
        say "fix: sudo bash $me"
        return 1
    }
    say "rootless: works (tried in $((($(date +%s%N) - start) / 1000000)) ms)"
}
from_sid() {
    local site found='' file missing loader keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e $keys ] || stop "this distribution does not offer apptainer, and it is not Debian;" \
        "fix: https://apptainer.org/docs/admin/main/installation.html"
    quietly "${install[@]}" ca-certificates squashfs-tools squashfuse uidmap patchelf
    mkdir -p "$work"/{lists/partial,cache/archives/partial,none,debs,libc}
    local sid=(apt-get -o Dir::Etc::SourceList="$work/sid.list" -o Dir::State::Lists="$work/lists"
        -o Dir::Etc::SourceParts="$work/none" -o Dir::Cache="$work/cache" -o Acquire::Retries=2
        -o Acquire::Languages=none -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any)
    # The mirrors that this machine already uses come first: others may be out of its reach.
    for site in $(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' \
        'Component: main' | sort -u) http://deb.debian.org/debian; do
        echo "deb [signed-by=$keys] $site sid main" >"$work/sid.list"
        "${sid[@]}" update >"$work/log" 2>&1 && found=$site && break
    done
    [ -n "$found" ] || { grep '^[EW]:' "$work/log" | tail -3 >&2; stop "no mirror in reach has sid"; }
    say "taking apptainer from Debian sid at $found, with a libc of its own"
    (cd "$work/debs" && quietly "${sid[@]}" download apptainer libc6 libseccomp2 libsqlite3-0)
    dpkg-deb -R "$work"/debs/apptainer_*.deb "$work/package"
    for file in "$work"/debs/lib*.deb; do dpkg-deb -x "$file" "$work/libc"; done
    mkdir -p "$work/package$private"
    cp -a "$work"/libc/usr/lib/*-linux-gnu*/*.so* "$work/package$private/"
    for file in "$work/package/usr/bin/apptainer" "$work"/package/usr/lib/*/apptainer/bin/starter; do
        loader=$private/$(basename "$(patchelf --print-interpreter "$file")")
        patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$private" "$file"
        missing=$("$work/package$loader" --library-path "$work/package$private" --list "$file" 2>&1 |
            grep 'not found' || true)
        [ -z "$missing" ] || stop "sid's apptainer wants a further library: $missing"
    done
    # A package, no loose files: dpkg -L lists it, apt-get remove takes it away. What sid's depends
    # on for networks of containers (CNI) is left out: nothing here uses them.
    sed -i -E -e 's/^(Version: .*)/\1+ownlibc1/' -e '/^(Static-)?Built-Using:/d' \
        -e 's/^Depends: .*/Depends: ca-certificates, squashfs-tools, squashfuse, uidmap/' \
        "$work/package/DEBIAN/control"
    (cd "$work/package" && find usr -type f -print0 | xargs -0 md5sum >DEBIAN/md5sums)
    quietly dpkg-deb --root-owner-group -Znone -b "$work/package" "$work/apptainer.deb"
    quietly "${install[@]}" --reinstall "$work/apptainer.deb"
}
mend_machine() { # always: device nodes and rights change from one start of a machine to the next
    local have lacking
    [ -e /dev/fuse ] || mknod /dev/fuse c 10 229 || true
    chmod 666 /dev/fuse || say "warning: /dev/fuse cannot be opened to users"
    # Root may lack capabilities (in containers, on some virtual machines). Apptainer run by root
    # then asks for what it cannot get and dies, unless it is told what there is.
    have=$(setpriv --dump | sed -n 's/^Capability bounding set: *//p' | tr ',' '\n' | sort)
    lacking=$(setpriv --list-caps | sort | comm -23 - <(echo "$have") | sed 's/^/CAP_/' | paste -sd,)
    [ -n "$lacking" ] || return 0
    have=$(sed 's/^/CAP_/' <<<"$have" | paste -sd,)
    "$found" capability drop --user root all >/dev/null 2>&1 || true
    quietly "$found" capability add --user root "${have^^}"
    quietly "$found" config global --set "root default capabilities" file
    say "root lacks ${lacking^^}; apptainer is told so. Before root builds an image with %post:" \
        "export APPTAINER_DROP_CAPS=${lacking^^}"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case ${1:-} in
    --check) check; exit ;;
    '') ;;
    *) stop "unknown option: $1; expected --check or nothing" ;;
esac
if [ "$(id -u)" != 0 ]; then
    find_it >/dev/null || stop "no apptainer here, and installing it needs root; type: sudo bash $me"
    say "already installed"
    check; exit
fi
exec 9<"$me"
flock 9 # one installation at a time
if ! found=$(find_it); then
    command -v apt-get >/dev/null || stop "no apt-get here; fix: install apptainer with the package" \
        "manager of this machine (Fedora, RHEL with EPEL: dnf install apptainer), then repeat this"
    apt=(apt-get -qq -o DPkg::Lock::Timeout=300)
    install=("${apt[@]}" -o Dpkg::Options::=--force-confold install -y --no-install-recommends)
    "${apt[@]}" update || say "warning: some package sources could not be read"
    offered=$(apt-cache madison apptainer | awk '/ Packages$/ {print $3; exit}')
    if [ -n "$offered" ]; then
        say "installing the distribution's apptainer $offered"
        quietly "${install[@]}" --reinstall apptainer squashfs-tools squashfuse uidmap
    else
        from_sid
    fi
    found=$(find_it) || stop "apptainer is installed and does not start: $(apptainer --version 2>&1)"
fi
mend_machine
check
