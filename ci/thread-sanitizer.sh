#!/usr/bin/env bash
# The C program and the random calls of the C ABI under ThreadSanitizer, with the library and Rust's
# standard library built for it: without that, every lock of Rust's looks like a race. Needs a nightly
# toolchain with rust-src, and clang; minutes, for the build.
set -euo pipefail
cd "$(dirname "$0")/.."
clang=${CLANG:-$(command -v clang-19 || command -v clang || true)}
runtime=$(rustc +nightly --print target-libdir 2>/dev/null || true)/librustc-nightly_rt.tsan.a
source=$(rustc +nightly --print sysroot 2>/dev/null || true)/lib/rustlib/src/rust/library
if [ -z "$clang" ] || [ ! -f "$runtime" ] || [ ! -d "$source" ]; then
  echo "SKIP tsan: needs clang and 'rustup toolchain install nightly --component rust-src'"
  case ,${KVFERRY_TEST_REQUIRE:-}, in *,tsan,*) exit 1 ;; esac
  exit 0
fi
target=x86_64-unknown-linux-gnu
folder=$(realpath "${CARGO_TARGET_DIR:-target}")/$target/debug/deps
export TSAN_OPTIONS="exitcode=66 report_thread_leaks=0"
RUSTFLAGS=-Zsanitizer=thread KVFERRY_TEST_CALLS=${KVFERRY_TEST_CALLS:-4000} \
  cargo +nightly test -Zbuild-std --target "$target" --test abi -- call

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
"$clang" -fsanitize=thread -std=c11 -D_GNU_SOURCE -g -O1 -Iinclude -c tests/c/smoke.c -o "$build/smoke.o"
# Rust's runtime is the one that knows what its compiler calls.
cc -no-pie -rdynamic "$build/smoke.o" -o "$build/smoke" -Wl,--whole-archive "$runtime" \
  -Wl,--no-whole-archive -ldl -lpthread -lm -lrt -lstdc++
"$build/smoke" "$folder/libkvferry.so" host
