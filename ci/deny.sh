#!/usr/bin/env bash
# Checks the dependencies' licences, that none is there twice, and that all come from crates.io
# (deny.toml). Compiles cargo-deny into target/tools, once, if there is none: 2 to 6 minutes, which is
# why ci/release.sh runs this and .ci/run does not. Known vulnerabilities are looked up where their
# database can be reached; KVFERRY_REQUIRE_ADVISORIES=1 makes it fail where not, or if there are any.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${CARGO_TARGET_DIR:-target}/tools
export PATH=$tools/bin:$PATH
if ! cargo deny --version >/dev/null 2>&1; then
  cargo install --quiet --debug --locked --root "$tools" --target-dir "$tools/build" cargo-deny
  rm -rf "$tools/build"
fi
cargo deny --workspace check licenses bans sources
if ! cargo deny --workspace check advisories; then
  echo "advisories: not clean, or their database cannot be reached (see above)" >&2
  [ -z "${KVFERRY_REQUIRE_ADVISORIES:-}" ]
fi
