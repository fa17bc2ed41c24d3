"""install-apptainer.sh on a machine of its own: a copy of this one that is thrown away.

The copy is an overlay over this machine's root in a mount namespace, with its own /tmp and its own
/dev/fuse, so that Apptainer can be removed, broken and installed again without anybody noticing.
Each test goes on where the one before it ended.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALLER = Path(__file__).resolve().parents[2] / "containers" / "install-apptainer.sh"
HERE = "/opt/install-apptainer.sh"

MAKE = """
set -e
mount -t tmpfs none "$1"
cd "$1"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
for name in dev proc sys; do mount --rbind /$name root/$name; done
mount -t tmpfs none root/tmp
chmod 1777 root/tmp
mknod -m 600 root/tmp/fuse c 10 229
mount --bind root/tmp/fuse root/dev/fuse
cp "$2" root/opt/
mkdir -p root/old
cd root
pivot_root . old
umount -l /old
echo made
exec sleep 1000
"""

BARE = """
dpkg --purge apptainer >/dev/null 2>&1
rm -rf /etc/apptainer
"""

# A package source that offers apptainer, as other distributions do: of the package that is there.
OFFER = """
mkdir -p /tmp/package/DEBIAN /srv/offer
dpkg -L apptainer | while read -r f; do
    if [ -d "$f" ]; then mkdir -p "/tmp/package$f"; else cp --parents "$f" /tmp/package; fi
done
dpkg-query -s apptainer | sed '/^Status:/d; /^Conffiles:/,/^[A-Z]/{/^Conffiles:/d; /^ /d}' \
    >/tmp/package/DEBIAN/control
sed -i 's/^Version: .*/Version: 99/' /tmp/package/DEBIAN/control
cd /srv/offer
dpkg-deb -Znone -b /tmp/package apptainer.deb >/dev/null
{ dpkg-deb -f apptainer.deb; echo "Filename: ./apptainer.deb"; echo "Size: $(stat -c %s *.deb)"
  echo "SHA256: $(sha256sum <apptainer.deb | cut -d' ' -f1)"; } >Packages
echo 'deb [trusted=yes] file:/srv/offer ./' >/etc/apt/sources.list.d/offer.list
"""


class Machine:
    """The copy; `bash` runs a text in it as root, or as nobody."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process

    def bash(self, text: str, *, user: bool = False) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--root"]
        who = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if user else []
        env = {"PATH": os.environ["PATH"], "HOME": "/tmp", "APPTAINER_BIND": "/no/such/folder"}
        env |= {} if user else {"TMPDIR": "/root"}  # which others cannot read
        return subprocess.run(
            [*enter, *who, "bash", "-c", "cd /\n" + textwrap.dedent(text)],
            capture_output=True,
            text=True,
            env=env,
            timeout=300,
        )

    def install(self, option: str = "", *, user: bool = False) -> tuple[int, str]:
        done = self.bash(f"{HERE} {option}", user=user)
        return done.returncode, done.stdout + done.stderr

    def facts(self, command: str) -> str:
        done = self.bash(command)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def machine(apptainer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if os.geteuid():
        pytest.skip("needs root")
    if "VERSION_CODENAME=bookworm" not in Path("/etc/os-release").read_text():
        pytest.skip("this is not Debian 12")
    folder = tmp_path_factory.mktemp("machine")
    process = subprocess.Popen(
        ["unshare", "--mount", "bash", "-c", MAKE, "-", str(folder), str(INSTALLER)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.stdout.readline() != "made\n":
        pytest.skip(f"no overlay of this machine: {process.stderr.read()}")
    yield Machine(process)
    process.kill()
    process.wait()


def test_without_apptainer(machine: Machine) -> None:
    machine.bash(BARE)
    before = machine.facts("dpkg -l | sha256sum")
    for user in (False, True):
        rc, said = machine.install("--check", user=user)
        assert rc == 1 and f"apptainer: none found; fix: sudo bash {HERE}" in said
    rc, said = machine.install(user=True)
    assert rc == 1 and said.endswith(f"needs root; type: sudo bash {HERE}\n")
    rc, said = machine.install("--chek")
    assert rc == 1 and "unknown option: --chek; expected --check or nothing" in said
    assert machine.facts("dpkg -l | sha256sum") == before


def test_from_sid(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the configured mirrors lack sid, and with settings of the user's in the way."""
    machine.facts("""
        rm -f /etc/apt/sources.list.d/*
        echo 'deb http://deb.debian.org/debian-security bookworm-security main' \
            >/etc/apt/sources.list
    """)
    untouched = "sha256sum /lib/x86_64-linux-gnu/libc.so.6 /etc/apt/sources.list; ls /etc/apt/*"
    before = machine.facts(untouched)
    start = time.monotonic()
    rc, said = machine.install()
    with capsys.disabled():
        print(f"\n  install from sid: {time.monotonic() - start:.0f} s")
    assert rc == 0 and "taking apptainer from Debian sid at http://deb.debian.org/debian" in said
    assert "rootless: works" in said and "/dev/fuse: open to users" in said
    assert machine.facts(untouched) == before
    assert "ownlibc1" in machine.facts(
        "apt-get check && dpkg-query -W apptainer && dpkg -V apptainer"
    )
    assert machine.facts("ls /tmp") == "fuse\n"  # nothing of ours is left


def test_repeated(machine: Machine) -> None:
    before = machine.facts(
        "dpkg -l; sha256sum /etc/apptainer/*.conf; stat -c %y /usr/bin/apptainer"
    )
    start = time.monotonic()
    rc, said = machine.install()
    assert rc == 0 and "taking" not in said and time.monotonic() - start < 5
    assert before == machine.facts(
        "dpkg -l; sha256sum /etc/apptainer/*.conf; stat -c %y /usr/bin/apptainer"
    )
    rc, said = machine.install(user=True)
    assert rc == 0 and "already installed" in said and "(/usr/bin/apptainer)" in said
    assert "subuid: none for nobody" in said and "rootless: works" in said


def test_mends_the_machine(machine: Machine) -> None:
    machine.facts("chmod 600 /dev/fuse")
    for user in (False, True):
        rc, said = machine.install("--check", user=user)
        assert rc == 1 and "/dev/fuse: closed to users" in said
        assert "rootless: does not work: " in said and f"fix: sudo bash {HERE}" in said
    assert machine.facts("stat -c %a /dev/fuse") == "600\n"  # a check changes nothing
    rc, said = machine.install()
    assert rc == 0 and "/dev/fuse: open to users" in said and "rootless: works" in said
    # The capabilities of a machine whose root has fewer of them than the last time.
    rc, said = machine.bash(f"capsh --drop=cap_sys_nice -- {HERE}").returncode, ""
    assert rc == 0
    assert "CAP_SYS_NICE" not in machine.facts("cat /etc/apptainer/capability.json")


def test_a_broken_one_is_replaced_by_what_the_distribution_offers(machine: Machine) -> None:
    machine.facts(OFFER)
    machine.facts("truncate -s 1000000 /usr/bin/apptainer")
    rc, said = machine.install()
    assert rc == 0 and "installing the distribution's apptainer 99" in said, said
    assert "rootless: works" in said and "taking" not in said
    assert machine.facts("dpkg-query -W -f '${Version}' apptainer") == "99"


def test_elsewhere_than_in_path(machine: Machine) -> None:
    """Where a site keeps its own, a user is told where it is."""
    machine.facts("""
        mkdir -p /opt/apptainer/1.4/bin
        mv /usr/bin/apptainer /usr/bin/the-sites-own
        ln -s /usr/bin/the-sites-own /opt/apptainer/1.4/bin/apptainer
    """)
    rc, said = machine.install(user=True)
    assert rc == 0 and "(/opt/apptainer/1.4/bin/apptainer)" in said, said
