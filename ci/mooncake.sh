#!/usr/bin/env bash
# Installs stock Mooncake (the PyPI wheel without CUDA) where tests/mooncake and the command's tests
# find it, and where KVFERRY_MOONCAKE_PATH may lead `kvferry bench --peer mooncake`: in
# target/mooncake, with the shared libraries that it wants from the system.
set -euo pipefail
cd "$(dirname "$0")/.."

installed=$(ldconfig -p)
missing=()
for library in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do
  [[ $installed == *"${library%:*}"* ]] || missing+=("${library#*:}")
done
if [ "${#missing[@]}" -gt 0 ]; then
  apt-get update
  apt-get install --yes --no-install-recommends "${missing[@]}"
fi

wheel=target/mooncake
if [ ! -d "$wheel/mooncake" ]; then
  rm -rf "$wheel"
  # Its transfer engine needs none of the Python packages that its store does.
  python3 -m pip install --quiet --no-deps --target "$wheel" \
    mooncake-transfer-engine-non-cuda==0.3.13.post1
fi
