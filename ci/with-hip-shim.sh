#!/usr/bin/env bash
# Runs a command with stand-ins for AMD's libraries on the library path (crates/hip-shim/README.md
# lists the variables that change them):
#   ci/with-hip-shim.sh cargo test -p kvferry-device --features rocm
#   ci/with-hip-shim.sh kvferry doctor
# KVFERRY_HIP_SHIM_PROFILE=release builds them, and kvferry, optimised. KVFERRY_HIP_SHIM_BUILT names
# a folder with hip-shim-install, libhip_shim.so and kvferry for a machine without cargo.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
profile=${KVFERRY_HIP_SHIM_PROFILE:-debug}
built=${KVFERRY_HIP_SHIM_BUILT:-}

if [ -z "$built" ]; then
    built=${CARGO_TARGET_DIR:-$here/target}/$profile
    flags=(--quiet --manifest-path "$here/Cargo.toml")
    [ "$profile" = debug ] || flags+=(--profile "$profile")
    cargo build "${flags[@]}" -p kvferry-hip-shim
    if [ "${1:-}" = kvferry ]; then
        cargo build "${flags[@]}" --bin kvferry --features rocm
    fi
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$built/hip-shim-install" "$folder"
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# What their compiler makes is no code for a GPU: it does not belong into the user's cache.
export XDG_CACHE_HOME=$folder/cache
PATH=$built:$PATH "$@"
