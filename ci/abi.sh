#!/usr/bin/env bash
# The C ABI: builds the shared library, compiles the header as C and C++, looks at the exported
# symbols, and runs the C program and the example engine, the program under valgrind as well.
#   ci/abi.sh [DEVICE]    host by default; cuda:0 or rocm:0 where there is one
# The library is built as it is released, for GPUs of both vendors, and so says on host memory what it
# does where there is no GPU library.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-host}
target=${CARGO_TARGET_DIR:-target}/debug
cargo build --quiet -p kvferry --features cuda,rocm
library=$(realpath "$target")/libkvferry.so
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

flags=(-Wall -Wextra -Werror -Iinclude)
echo '#include "kvferry.h"' | c++ -std=c++11 -pedantic "${flags[@]}" -fsyntax-only -x c++ -
# Of the shim for Mooncake's engine, what needs no Mooncake.
shim=integrations/mooncake
for header in include/kvferry.h $shim/include/kvferry_mooncake.h; do
  cc -std=c11 -pedantic "${flags[@]}" -fsyntax-only -x c "$header"
done
c++ -std=c++20 -g "${flags[@]}" $shim/tests/plugin.cpp $shim/src/plugin.cpp -o "$build/plugin" -ldl
cc -std=c11 -D_GNU_SOURCE -g "${flags[@]}" tests/c/smoke.c -o "$build/smoke" -ldl -pthread
cc -std=c11 -D_GNU_SOURCE -g "${flags[@]}" examples/engine.c -o "$build/engine" -ldl

exported=$(nm --dynamic --defined-only --extern-only "$library" | awk '{print $3}')
if [ "$exported" != kvferry_load ]; then
  echo "libkvferry.so exports more than kvferry_load: $exported" >&2
  exit 1
fi
readelf --dynamic "$library" | grep -q 'SONAME.*libkvferry.so.0'
readelf --dynamic "$library" | grep -q 'NODELETE'

"$build/smoke" "$library" "$device"
"$build/engine" "$library" "$device"
"$build/plugin" "$library"
if [ "$device" = host ]; then
  valgrind --quiet --error-exitcode=99 --leak-check=full --show-leak-kinds=definite \
    --errors-for-leak-kinds=definite "$build/smoke" "$library" "$device"
fi
