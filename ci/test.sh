#!/usr/bin/env bash
# Formats, lints and tests everything that needs no GPU; on a machine with one, the GPU's tests too
# (they print SKIP and why where it is missing). KVFERRY_TEST_REQUIRE=cuda,cxx,nvrtc turns the
# skips of these into failures.
set -euo pipefail
cd "$(dirname "$0")/.."

# A test that hangs, or a property that fails slowly and would be made smaller for hours, ends in time:
# the longest of these takes five minutes on two cores, its build another ten.
limited="timeout --kill-after=1m 25m"
export PROPTEST_MAX_SHRINK_TIME="${PROPTEST_MAX_SHRINK_TIME:-60000}"

cargo fmt --check
cargo clippy --workspace --all-targets -- --deny warnings
cargo clippy --workspace --all-targets --all-features -- --deny warnings
RUSTDOCFLAGS="--deny warnings" cargo doc --workspace --no-deps --all-features
$limited cargo test --workspace --all-features
# What needs AMD's own libraries, on each version that ci/rocm-roots.sh found: the bindings agree with
# their headers, the loader knows them, their compiler compiles the kernel, and doctor describes them.
ci/bindings.sh check
shopt -s nullglob
for root in target/rocm/*; do
  version=$(basename "$root")
  on_root="$PWD/ci/with-rocm-root.sh $version"
  CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$on_root \
    KVFERRY_TEST_REQUIRE=hip,hiprtc,comgr,cxx,no-gpu \
    $limited cargo test --workspace --all-features --lib --test kernel_isa -- rocm:: hiprtc
  $on_root "${CARGO_TARGET_DIR:-target}/debug/kvferry" doctor | grep --after-context 2 "^HIP $version"
done
# The ROCm backend end to end, on stand-ins for AMD's libraries: every suite that has a device of it.
export KVFERRY_TEST_REQUIRE=rocm,hip,hip-shim,cxx
ci/with-hip-shim.sh $limited cargo test --workspace --all-features -- rocm
ci/with-hip-shim.sh $limited cargo test --workspace --all-features --test rocm
ci/with-hip-shim.sh kvferry doctor | grep "^| rocm:1"
ci/with-hip-shim.sh kvferry bench --device rocm:0 --peer-device rocm:1 --shape R2,W18 --iterations 3
ci/with-hip-shim.sh kvferry bench --transport offload --device rocm:0 --shape R6 --cache 16x8x4096 --most-pieces 300 --iterations 2
# The plugin, from C: on host memory, and on the stand-ins.
ci/abi.sh
ci/with-hip-shim.sh ci/abi.sh rocm:0
# The main job, small: two processes, both directions, every byte verified.
cargo run --quiet --bin kvferry -- bench --shape R2,W18,R6m --op both --iterations 3
cargo run --quiet --bin kvferry -- doctor >/dev/null
