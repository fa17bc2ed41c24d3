#!/usr/bin/env bash
# The part of build.sh that runs in the Debian 11 root: /build/python and /build/debian become
# /build/out/python, which runs from anywhere.
set -euo pipefail
cd /build/python
export LC_ALL=C SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(date -d "$(sed -n 's/^ -- .*>  //p' ../debian/changelog | head -1)" +%s)
# The *.patch files are upstream's fixes; the *.diff files fit Python into Debian's own folders.
for patch in $(grep '\.patch$' ../debian/patches/series); do
    patch -p1 --silent <"../debian/patches/$patch"
done
./configure -q --prefix=/python --disable-test-modules --without-static-libpython \
    --with-ensurepip=install CFLAGS=-g0
make -s -j"$(nproc)"
make -s install DESTDIR=/build/out
cd /build/out/python
for module in _bz2 _ctypes _hashlib _lzma _sqlite3 _ssl zlib; do
    ls lib/python*/lib-dynload/"$module".*.so >/dev/null
done

# Only what a program needs at run time.
rm -rf include share lib/pkgconfig lib/python*/{config-*,test,idlelib,turtledemo,tkinter,pydoc_data}
find . -name __pycache__ -prune -exec rm -rf {} +
find bin -type l -o -type f ! -name 'python3.[0-9]*' -o -name '*-config' | xargs rm -f
python=$(cd bin && echo python3.*)
ln -s "$python" bin/python3

modules=(lib/python*/lib-dynload/*.so)
strip "bin/$python" "${modules[@]}"
libraries=$(ldd "bin/$python" "${modules[@]}" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -vE '/(ld-linux.*|lib(c|m|dl|pthread|rt|util|resolv|nsl))[.-]')
# numpy and pyarrow take the C++ library of the machine, and LD_LIBRARY_PATH may show them any.
libraries+=$'\n'$(ldconfig -p | sed -n 's/.*x86-64) => \(.*\/lib\(stdc++\.so\.6\|gcc_s\.so\.1\)\)$/\1/p')
mkdir -p share/licenses
for library in $(sort -u <<<"$libraries"); do
    cp -L "$library" lib/
    package=$(dpkg -S "$(realpath "$library")" 2>/dev/null || dpkg -S "$library")
    package=${package%%:*}
    cp -L "/usr/share/doc/$package/copyright" "share/licenses/$package"
    packages+=("$package")
done
dpkg-query -W "${packages[@]}" | sort -u >share/source.txt
cp ../../python/LICENSE share/licenses/python
chmod u+w,a+r lib/*.so*
for library in lib/*.so*; do patchelf --force-rpath --set-rpath '$ORIGIN' "$library"; done
for module in "${modules[@]}"; do patchelf --force-rpath --set-rpath '$ORIGIN/../..' "$module"; done
patchelf --force-rpath --set-rpath '$ORIGIN/../lib' "bin/$python"
patchelf --add-needed libstdc++.so.6 "bin/$python" # in one call patchelf mixes the two up
# Byte code that stays right whatever a copy makes of the times of files; -B -f, or what compileall
# imports itself would get the other kind.
"bin/$python" -I -B -m compileall -q -f --invalidation-mode unchecked-hash lib
