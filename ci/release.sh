#!/usr/bin/env bash
# Makes target/kvferry-VERSION-MACHINE.tar.gz: bin/kvferry, lib/libkvferry.so with its links,
# include/kvferry.h, lib/pkgconfig/kvferry.pc, the README and the licence.
set -euo pipefail
cd "$(dirname "$0")/.."
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
install --mode 644 README.md LICENSE CHANGELOG.md "$root"
mkdir -p target
tar --create --gzip --file "target/$name.tar.gz" --directory "$folder" \
  --owner 0 --group 0 --sort name "$name"
echo "target/$name.tar.gz"
