#!/bin/bash
# Builds build/own-kernel/vmlinux: Debian's kernel source with `config` and nothing else, so that all a guest needs is
# built in. About ten minutes on two processors. Needs apt, as root where a package is missing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../../build/own-kernel
mkdir -p "$out"
cd "$out"
package=$(apt-cache depends linux-source | sed -n 's/^ *Depends: //p' | head -n 1)
apt-get download -q "$package"
rm -rf unpacked source
dpkg-deb -x "$package"_*.deb unpacked
mkdir source
tar -xJf unpacked/usr/src/"$package".tar.xz -C source --strip-components=1
cd source
make -s allnoconfig KCONFIG_ALLCONFIG="$here/config"
for wanted in $(grep -o '^CONFIG_[A-Z0-9_]*' "$here/config"); do
    grep -q "^$wanted=y" .config || { echo "the source has no $wanted" >&2; exit 1; }
done
make -s -j"$(nproc)" vmlinux
cp vmlinux ../vmlinux.new
cd ..
mv vmlinux.new vmlinux
rm -rf unpacked source "$package"_*.deb
