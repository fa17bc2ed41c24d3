#!/usr/bin/env bash
# Installs kimi-eagle's light base (what a login node needs) from a bundle made by `make bundle`.
#   install.sh --prefix DIR [--offline] [--bundle FILE|DIR] [--prune]     (--help says more)
# Needs no root, no Python and no compiler: bash, tar, sha256sum and what stands beside it in
# coreutils. Everything is made in a folder beside its place and renamed at the end, so that a
# killed installation leaves what was there before, and typing it again does the rest.
#   DIR/lib/kimi-eagle/VERSION-DIGEST  Python, packages, recipes; never changed once it is there
#   DIR/lib/kimi-eagle/current         link to the one in use: the only thing that an upgrade changes
#   DIR/bin/kimi-eagle                 link to the start script in there
#   DIR/share/kimi-eagle               jobs, sites, containers (links), model, images (by digest)
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
umask 022 # for all users of a shared file system
unset CDPATH TAR_OPTIONS ENV BASH_ENV
export LC_ALL=C # messages are read below

help() {
    cat <<'HELP'
Usage: install.sh --prefix DIR [--offline] [--bundle FILE|DIR] [--prune]

Installs the command kimi-eagle as DIR/bin/kimi-eagle, for all users of DIR, without root. Type it
again to repair an installation, or from a newer bundle to upgrade one; running jobs and programs
go on with the version they started with.

  --prefix DIR        where to; made if needed; may be moved or mounted elsewhere later
  --offline           take packages from the bundle only; without it pip asks its own index for
                      them, as it is configured here (every file is checked by sha256 in both cases)
  --bundle FILE|DIR   the bundle [default: the folder of this script, or the one archive in it]
  --prune             remove older versions (jobs still in the queue may want them)
  --help              this text

To remove all: rm -r DIR/bin/kimi-eagle DIR/lib/kimi-eagle DIR/share/kimi-eagle
HELP
}
say() { printf 'install: %s\n' "$*"; }
stop() { printf 'install: error: %s\n' "$*" >&2; exit 1; }
wrong() { printf 'install: error: %s\n' "$*" >&2; exit 2; }
last() { # TEXT: the last line that says why, for a message of one line
    local line found='' error=''
    while IFS= read -r line; do
        case $line in
            '' | WARNING* | *'[notice]'* | 'tar: Exiting'* | 'tar: Error is not'*) ;;
            ERROR:*) error=${line#ERROR: } ;;
            *) found=$line ;;
        esac
    done <<<"$1"
    printf '%s' "${error:-${found:-no reason given}}"
}

read_facts() { # the lines `key=value` of BUNDLE, into fact[key]
    local line
    [ -f "$bundle/BUNDLE" ] || return 1
    while IFS= read -r line; do
        [[ $line =~ ^([a-z_]+)=([A-Za-z0-9._/+-]*)$ ]] && fact[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    done <"$bundle/BUNDLE"
    [ "${fact[format]:-}" = bundle/1 ] || stop "$bundle/BUNDLE: another format of bundle:" \
        "'${fact[format]:-}'; expected bundle/1; fix: take the install.sh that is in the bundle"
    for line in version id arch glibc python room_mb files; do
        [ -n "${fact[$line]:-}" ] || stop "$bundle/BUNDLE: damaged, no $line; fix: unpack or" \
            "copy the bundle again"
    done
}

check_machine() { # architecture, libc
    local machine libc have want
    machine=$(uname -m)
    [ "$(uname -s) $machine" = "Linux ${fact[arch]}" ] || stop "this machine is $(uname -s) $machine;" \
        "expected Linux ${fact[arch]}; fix: make the bundle on a machine of that kind"
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc=$(ldd --version 2>&1) || : # musl: none
    [[ ${libc%%$'\n'*} =~ ^(glibc|ldd.*)\ ([0-9]+)\.([0-9]+) ]] ||
        stop "no glibc here; expected glibc ${fact[glibc]} or newer"
    have=$((BASH_REMATCH[2] * 1000 + BASH_REMATCH[3]))
    want=$((${fact[glibc]%.*} * 1000 + ${fact[glibc]#*.}))
    [ "$have" -ge "$want" ] || stop "glibc here is ${BASH_REMATCH[2]}.${BASH_REMATCH[3]}; expected" \
        "${fact[glibc]} or newer (Debian 11, Ubuntu 20.04, RHEL 9); fix: use a newer login node"
}

check_bundle() { # every file against MANIFEST
    local said
    [ -s "$bundle/MANIFEST" ] || stop "$bundle: no MANIFEST: cut short; fix: unpack or copy it again"
    said=$(cd "$bundle" && sha256sum --check --strict --quiet MANIFEST 2>&1) || stop \
        "$bundle: damaged: $(head -n 1 <<<"${said#sha256sum: }"); expected what MANIFEST says;" \
        "fix: unpack or copy the bundle again"
    said=$(wc -l <"$bundle/MANIFEST")
    [ "$said" -eq "${fact[files]}" ] || stop "$bundle/MANIFEST: damaged: $said files; expected" \
        "${fact[files]}; fix: unpack or copy the bundle again"
}

make_folders() { # everything of ours below the prefix, and a place to work
    local path said
    said=$(mkdir -p -- "$prefix" 2>&1) ||
        stop "$(last "${said#mkdir: }"); expected a folder to write into; fix: another --prefix"
    prefix=$(cd -L -- "$prefix" && pwd -L) || stop "$prefix: cannot be entered"
    versions=$prefix/lib/kimi-eagle share=$prefix/share/kimi-eagle
    for path in "$prefix/bin/kimi-eagle" "$prefix/lib/kimi-eagle/current" \
        "$share"/{jobs,sites,containers}; do
        [ ! -e "$path" ] || [ -L "$path" ] || stop "$path: is there and not ours; expected" \
            "nothing or a link of an earlier installation; fix: another --prefix, or move it away"
    done
    said=$(mkdir -p -- "$prefix/bin" "$versions" "$share" 2>&1) ||
        stop "$(last "${said#mkdir: }"); expected a folder to write into; fix: another --prefix"
    for path in "$prefix/bin" "$versions" "$share"; do
        [ -w "$path" ] || stop "$path: cannot be written; fix: another --prefix, or ask its owner"
    done
    work=$versions/.new-$host-$$ tree=$work/tree
    said=$(mkdir -p -- "$tree" "$work/home" 2>&1) ||
        stop "$(last "${said#mkdir: }"); fix: another --prefix"
    export TMPDIR=$work/home # older bashes write here-documents there; /tmp may be full
    trap 'rm -rf -- "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

sweep() { # what killed installations left; one at work on this or another machine keeps its own
    local path pid
    for path in "$versions"/.new-* "$versions"/.old-*; do
        if [ ! -d "$path" ] || [ "$path" = "$work" ]; then continue; fi
        pid=${path##*-}
        if [ "${path%-*}" = "$versions/.new-$host" ] || [ "${path%-*}" = "$versions/.old-$host" ]; then
            [ -d "/proc/$pid" ] || rm -rf -- "$path"
        else
            say "left by an installation on another machine, if none is at work: rm -r '$path'"
        fi
    done
}

room() { # MEGABYTES: are they free where we work?
    local free
    free=$(df --output=avail -B 1048576 -- "$versions" 2>/dev/null) || return 0
    free=${free##*[!0-9]}
    [ -z "$free" ] || [ "$free" -ge "$1" ] ||
        stop "$prefix: $free MB free; expected $1 MB; fix: free some, or another --prefix"
}

run_python() { # ARGUMENTS...: the new Python, apart from whatever the user has set up
    (
        unset "${!PYTHON@}" "${!LD_@}" PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_DRY_RUN PIP_LOG
        unset PIP_REQUIRE_VIRTUALENV PIP_CACHE_DIR PIP_BREAK_SYSTEM_PACKAGES PIP_REPORT
        if [ "$offline" = 1 ]; then
            unset "${!PIP_@}"
            export PIP_CONFIG_FILE=/dev/null HOME="$work/home"
        fi
        exec env LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1 \
            "$tree/bin/${fact[python]}" -I -B "$@"
    )
}
pip_install() { # LOCK ARGUMENTS...
    local said lock=$1
    shift
    said=$(run_python -m pip install --quiet --no-input --no-deps --require-hashes --no-compile \
        --only-binary=:all: --no-cache-dir --disable-pip-version-check --no-warn-script-location \
        --root-user-action=ignore --ignore-installed "$@" -r "$bundle/locks/$lock.lock" 2>&1) ||
        stop "packages of locks/$lock.lock could not be installed: $(last "$said")$(full)"
}
full() { # a hint where the file system has run full meanwhile
    local free
    free=$(df --output=avail -B 1048576 -- "$versions" 2>/dev/null) || return 0
    [ "${free##*[!0-9]}" -ge 8 ] 2>/dev/null || printf '; %s is full; fix: free some space' "$prefix"
}

build() { # the version, complete, in $tree
    local said packages
    said=$(tar -xf "$bundle/python.tar" -C "$tree" --no-same-owner 2>&1) ||
        stop "Python could not be unpacked into $tree: $(last "$said")$(full)"
    said=$(run_python -c 'import ssl, sqlite3, ctypes, lzma, bz2, zlib' 2>&1) ||
        stop "programs do not run from $prefix: $(last "$said"); fix: a --prefix on a file system" \
            "without noexec"
    if [ "$offline" = 1 ]; then
        pip_install base --no-index --find-links "$bundle/wheels"
    else
        pip_install base
    fi
    pip_install package --no-index --find-links "$bundle/wheels"
    packages=$(run_python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') ||
        stop "the new Python does not know its folders"
    said=$(lay_out "$packages" 2>&1) || stop "$tree: could not be written: $(last "$said")$(full)"
    # Byte code that stays right when a copy changes the times of files. Some packages hold files
    # that are no Python of this version, by intent; what matters is imported below.
    run_python -m compileall -q -f -j 4 --invalidation-mode unchecked-hash "$packages" \
        >/dev/null 2>&1 || :
    said=$(run_python -c "$import_all" 2>&1) ||
        stop "an installed package does not work: $(last "$said")$(full)"
    said=$("$tree/bin/kimi-eagle" --version 2>&1) || stop "kimi-eagle does not start: $(last "$said")"
    said=$(run_python -c "$list_files" "$tree" 2>&1) || stop "$(last "$said")$(full)"
    sync -f "$tree" 2>/dev/null || sync
}
lay_out() { # PACKAGES: what lies beside Python and its packages
    local file
    for file in "$tree"/bin/*; do # pip's start scripts hold this folder's name; ours does not
        case ${file##*/} in python3 | "${fact[python]}") ;; *) rm -f -- "$file" ;; esac
    done
    mkdir -p "$tree/libexec" "$tree/share/containers/locks" &&
        printf '%s\n' "$program" >"$tree/libexec/kimi-eagle" &&
        start_script >"$tree/bin/kimi-eagle" && chmod 755 "$tree/bin/kimi-eagle" &&
        cp -R "$1/kimi_eagle/_jobs" "$tree/share/jobs" &&
        cp -R "$1/kimi_eagle/_slurm/sites" "$tree/share/sites" &&
        cp "$bundle/locks"/*.lock "$tree/share/containers/locks" &&
        cp "$bundle"/install*.sh "$tree/share/containers"
}
# Every top-level module of every package, so that a library that the machine lacks shows here.
import_all='
import importlib
from importlib.metadata import packages_distributions
for name in sorted(packages_distributions()):
    if name.isidentifier() and not name.startswith("_"):
        importlib.import_module(name)
import kimi_eagle.cli.submit
'
list_files='
import hashlib, os, sys
top = sys.argv[1]
lines = []
for folder, _, names in os.walk(top):
    for name in names:
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {os.path.relpath(path, top)}\n")
with open(os.path.join(top, "files.sha256"), "w") as file:
    file.writelines(sorted(lines))
    file.flush()
    os.fsync(file.fileno())
'

start_script() { # what DIR/bin/kimi-eagle is
    cat <<START
#!/bin/sh
# Starts kimi-eagle from wherever this folder lies; made by install.sh.
# The version is settled here, so that an upgrade leaves what runs alone. Links above the prefix
# are left as they are: another machine may reach it by that name only.
me=\$0
case \$me in */*) ;; *) me=./\$me ;; esac
while [ -L "\$me" ]; do
    to=\$(readlink -- "\$me")
    case \$to in /*) me=\$to ;; *) me=\${me%/*}/\$to ;; esac
done
root=\$(unset CDPATH; cd -L -- "\${me%/*}/.." && pwd -L) || exit 1
if [ -L "\$root" ]; then root=\${root%/*}/\$(readlink -- "\$root"); fi
# Also for the Pythons that it starts: nothing of the user's, of the working directory's or of
# another Python's gets in. LD_LIBRARY_PATH stays, Slurm's programs may need it; this Python
# looks beside itself first.
unset PYTHONHOME PYTHONPATH PYTHONPLATLIBDIR PYTHONUSERBASE PYTHONEXECUTABLE PYTHONSTARTUP
unset PYTHONINSPECT PYTHONOPTIMIZE PYTHONPYCACHEPREFIX PYTHONCASEOK __PYVENV_LAUNCHER__
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1
exec "\$root/bin/${fact[python]}" -I -B "\$root/libexec/kimi-eagle" "\$@"
START
}
program='import sys

from kimi_eagle.cli import main

sys.exit(main())' # what it starts; the name of its file is the one that --help shows

intact() { # FOLDER: a version as it was installed
    [ -s "$1/files.sha256" ] && [ -x "$1/bin/kimi-eagle" ] && [ -x "$1/bin/${fact[python]}" ] &&
        (cd "$1" && sha256sum --check --strict --status files.sha256) 2>/dev/null
}

put_in_place() { # FOLDER: what was built; a damaged one of that name goes
    local old=$versions/.old-$host-$$
    [ ! -d "$1" ] || mv -T -- "$1" "$old" 2>/dev/null ||
        stop "$1: damaged, and cannot be moved away; fix: ask its owner to remove it"
    # Where another installation was faster, its folder is as good.
    mv -T -- "$tree" "$1" 2>/dev/null || [ -d "$1" ] || stop "$1: could not be made"
    rm -rf -- "$old"
}

link() { # TARGET NAME: a link, replaced in one step
    local said
    said=$(ln -sfn -- "$1" "$work/link" 2>&1 && mv -fT -- "$work/link" "$2" 2>&1) ||
        stop "$2: the link could not be made: $(last "$said")$(full)"
}

big_files() { # model and images, as the bundle has them; one that is there is compared, not copied
    local digest name target said
    while read -r digest name; do
        case $name in model/* | images/*) ;; *) continue ;; esac
        target=$share/$name
        if [ -f "$target" ] && said=$(sha256sum <"$target") && [ "${said%% *}" = "$digest" ]; then
            continue
        fi
        say "copying $name"
        said=$(mkdir -p -- "${target%/*}" 2>&1 && cp --reflink=auto -- "$bundle/$name" "$work/big" 2>&1) ||
            stop "$target: could not be written: $(last "$said")$(full)"
        sync -f "$work/big" 2>/dev/null || sync
        mv -fT -- "$work/big" "$target" || stop "$target: could not be put in place"
    done <"$bundle/MANIFEST"
}

others() { # older versions: say so, or remove them
    local path count=0
    for path in "$versions"/*/; do
        path=${path%/}
        if [ -L "$path" ] || [ "${path##*/}" = "${fact[id]}" ]; then continue; fi
        if [ "$prune" = 0 ]; then
            count=$((count + 1))
        else
            rm -rf -- "$path" && say "removed ${path##*/}"
        fi
    done
    [ "$count" = 0 ] || say "$count older version(s) kept for jobs in the queue; to remove: --prune"
}

tell() {
    local image q
    printf -v q '%q' "$prefix"
    say "kimi-eagle ${fact[version]} is installed in $prefix"
    echo "now type:"
    case :$PATH: in *":$prefix/bin:"*) ;; *) echo "  export PATH=$q/bin:\$PATH" ;; esac
    echo "  kimi-eagle site init mycluster        a site file for this cluster"
    echo "  cp -r $q/share/kimi-eagle/jobs .      recipes to change"
    for image in "$share"/images/*/*.sif; do
        [ ! -f "$image" ] || echo "image, for [container] in a recipe or site: $image"
    done
}

main() { # all in functions: a script cut short does nothing
    local here said found
    prefix='' bundle='' offline=0 prune=0 work='' tree=''
    declare -gA fact=()
    while [ $# -gt 0 ]; do
        case $1 in
            --help | -h) help; exit 0 ;;
            --offline) offline=1 ;;
            --prune) prune=1 ;;
            --prefix=*) prefix=${1#*=} ;;
            --bundle=*) bundle=${1#*=} ;;
            --prefix | --bundle)
                [ $# -gt 1 ] || wrong "$1 wants a value; see install.sh --help"
                if [ "$1" = --prefix ]; then prefix=$2; else bundle=$2; fi
                shift ;;
            *) wrong "unknown argument '$1'; see install.sh --help" ;;
        esac
        shift
    done
    [ -n "$prefix" ] || wrong "no --prefix; expected the folder to install into; see install.sh --help"
    case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
    while [ "$prefix" != / ] && [ "${prefix%/}" != "$prefix" ]; do prefix=${prefix%/}; done
    case $prefix in *:* | *$'\n'*) wrong "--prefix '$prefix' has a colon or a line end in it, which" \
        "PATH cannot hold; fix: another folder" ;; esac
    [ ! -e "$prefix" ] || [ -d "$prefix" ] || wrong "$prefix: is no folder; fix: another --prefix"
    host=${HOSTNAME:-$(uname -n)}
    for said in tar sha256sum; do
        command -v "$said" >/dev/null || stop "no program '$said'; expected bash, tar and coreutils"
    done

    here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
    if [ -z "$bundle" ]; then
        bundle=$here
        found=("$here"/kimi-eagle-*-linux-*.tar)
        if [ ! -f "$here/BUNDLE" ] && [ -f "${found[0]}" ]; then
            [ "${#found[@]}" = 1 ] || wrong "$here: several bundles; fix: --bundle FILE"
            bundle=${found[0]}
        fi
    fi
    [ -e "$bundle" ] || wrong "$bundle: no such bundle"
    bundle=$(cd -- "$(dirname -- "$bundle")" && pwd)/$(basename -- "$bundle")
    if [ -f "$bundle" ]; then
        make_folders
        room $(($(stat -c %s -- "$bundle") >> 20))
        mkdir "$work/bundle"
        said=$(tar -xf "$bundle" -C "$work/bundle" --strip-components=1 --no-same-owner 2>&1) ||
            stop "$bundle: could not be unpacked: $(last "$said")$(full)"
        bundle=$work/bundle
    fi
    read_facts || wrong "$bundle: not a bundle (no BUNDLE in it); fix: make bundle, then --bundle FILE"
    check_machine
    say "checking the bundle of kimi-eagle ${fact[version]}"
    check_bundle
    [ -n "$work" ] || make_folders
    sweep
    if intact "$versions/${fact[id]}"; then
        say "${fact[id]} is there already, and as it was installed"
    else
        room "${fact[room_mb]}"
        say "installing ${fact[id]} into $prefix"
        build
        put_in_place "$versions/${fact[id]}"
    fi
    big_files
    link "${fact[id]}" "$versions/current"
    link ../lib/kimi-eagle/current/bin/kimi-eagle "$prefix/bin/kimi-eagle"
    for said in jobs sites containers; do
        link "../../lib/kimi-eagle/current/share/$said" "$share/$said"
    done
    others
    tell
}
main "$@"
