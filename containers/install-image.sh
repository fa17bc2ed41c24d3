#!/bin/sh
# Installs the lock and this project's wheel into an image: %post of both definitions runs
#   sh /mnt/install-image.sh FLAVOUR PYTHON MINOR
# inside. Reads /mnt (this file, lock, pip-*.whl, facts and, but for a base image, app/*.whl) and
# /srv (the lock's wheels); writes /opt/kimi-eagle. Reads no package index and no pip settings, so
# that no host name and no certificate of the building machine gets in.
# With the same lock there already, as on a base image, only the wheel is installed.
set -eu
flavour=$1 python=$2 minor=$3
home=/opt/kimi-eagle
export LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1 HOME=/root PATH="$PATH:/usr/local/bin:/usr/bin:/bin"
unset PYTHONPATH PYTHONHOME

say() { echo "install-image: $*"; }
stop() { echo "install-image: error: $*" >&2; exit 1; }

have=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    stop "the base image has no $python"
[ "$have" = "$minor" ] || stop "$python of the base image is $have, the lock is for $minor"

if [ ! -x $home/bin/python ]; then
    mkdir -p $home
    # CUDA: the base's own torch and vLLM are seen from the environment, and stay as they are.
    if [ "$flavour" = cuda ]; then
        "$python" -m venv --without-pip --system-site-packages $home
    else
        "$python" -m venv --without-pip $home
    fi
fi
pip() { # ARGS...: the pip of /mnt, without any settings, into the environment
    PIP_CONFIG_FILE=/dev/null $home/bin/python "$(echo /mnt/pip-*.whl)/pip" "$@"
}
pip_install() {
    pip install --quiet --isolated --no-input --no-cache-dir --disable-pip-version-check \
        --root-user-action=ignore --no-index --no-deps "$@"
}

if ! cmp -s /mnt/lock $home/lock 2>/dev/null; then
    # --ignore-installed: also what the base has in this very version, so that every file of the
    # lock has the lock's hash.
    if grep -q '^[A-Za-z0-9]' /mnt/lock; then
        say "installing $(grep -c '^[A-Za-z0-9]' /mnt/lock) packages of the lock"
        pip_install --no-compile --ignore-installed --require-hashes --find-links /srv -r /mnt/lock
        # On all cores, which pip does not. Some packages hold templates that are no Python.
        $home/bin/python -m compileall -qq -j 0 $home/lib || true
    fi
    cp /mnt/lock $home/lock
fi
if [ -d /mnt/app ]; then
    say "installing kimi-eagle"
    pip_install --force-reinstall /mnt/app/*.whl
    sed -n 's/^org.opencontainers.image.revision //p' /mnt/facts >$home/revision
    $home/bin/python -m kimi_eagle.images.inside labels "$flavour" /mnt/facts >$home/labels
    cat $home/labels >>"$APPTAINER_LABELS"
    $home/bin/python -m kimi_eagle.images.sbom >$home/sbom.cdx.json
fi

# What making the system left behind: the building machine's name and package sources, caches.
rm -rf /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/lib/apt/lists/* /var/log/*.log \
    /var/log/apt /root/.cache /tmp/pip-* 2>/dev/null || true
if [ "$flavour" = cpu ]; then
    : 2>/dev/null >/etc/hostname || true
    [ ! -f /etc/apt/sources.list ] ||
        echo "deb http://deb.debian.org/debian bookworm main" >/etc/apt/sources.list
fi
chmod -R a+rX,go-w $home
