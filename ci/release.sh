#!/usr/bin/env bash
# Makes target/kvferry-VERSION-MACHINE.tar.gz: bin/kvferry, lib/libkvferry.so with its links,
# include/kvferry.h, lib/pkgconfig/kvferry.pc, examples/engine.c, the README and the licence. Checks the
# dependencies before (ci/deny.sh) and the tarball afterwards, as a user has it: unpacked elsewhere,
# found by pkg-config, loaded by the example. SKIP_DENY=1 leaves the first check out.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${SKIP_DENY:-}" ] || ci/deny.sh
version=$(cargo pkgid -p kvferry | sed 's/.*[@#]//')
name=kvferry-$version-$(uname -m)
built=${CARGO_TARGET_DIR:-target}/release
cargo build --release --features cuda,rocm -p kvferry -p kvferry-cli

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
root=$folder/$name
install -D --strip "$built/kvferry" "$root/bin/kvferry"
install -D --strip "$built/libkvferry.so" "$root/lib/libkvferry.so.0"
ln -s libkvferry.so.0 "$root/lib/libkvferry.so"
install -D --mode 644 include/kvferry.h "$root/include/kvferry.h"
install -d "$root/lib/pkgconfig"
sed "s/@VERSION@/$version/" ci/kvferry.pc.in >"$root/lib/pkgconfig/kvferry.pc"
install -D --mode 644 examples/engine.c "$root/examples/engine.c"
install --mode 644 README.md LICENSE CHANGELOG.md "$root"
mkdir -p target
tar --create --gzip --file "target/$name.tar.gz" --directory "$folder" \
  --owner 0 --group 0 --sort name "$name"

user=$folder/user
mkdir "$user"
tar --extract --gzip --file "target/$name.tar.gz" --directory "$user" --strip-components 1
export PKG_CONFIG_PATH=$user/lib/pkgconfig
read -ra flags < <(pkg-config --cflags --libs kvferry)
cc -Wall -Werror "$user/examples/engine.c" -o "$user/engine" "${flags[@]}" -ldl
# The example opens the library by its name, in the folder that pkg-config knows.
LD_LIBRARY_PATH=$(pkg-config --variable=libdir kvferry) "$user/engine"
"$user/bin/kvferry" doctor >/dev/null
echo "target/$name.tar.gz"
