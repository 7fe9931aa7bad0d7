#!/usr/bin/env bash
# Runs a program with a HIP library of ci/rocm-roots.sh: ci/with-rocm-root.sh VERSION PROGRAM...
#
# The root's libraries need a newer C library than this system may have, so the program runs on the
# root's own loader. What the program starts in its turn runs on the system's again. As a runner:
#   CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$PWD/ci/with-rocm-root.sh 5.7" cargo test
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)/target/rocm/$1
program=$(command -v "$2")
shift 2
libraries=$root/usr/lib/x86_64-linux-gnu
if [ ! -d "$libraries" ]; then
  echo "$root is not there: ci/rocm-roots.sh makes it" >&2
  exit 2
fi
export AMD_COMGR_CACHE=0 # else 7.2 keeps compiled code in the home directory
compiler=$(printf '%s:' "$root"/usr/lib/llvm-*/lib)
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:${compiler%:}" "$program" "$@"
