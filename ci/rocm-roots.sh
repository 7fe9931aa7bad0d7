#!/usr/bin/env bash
# Unpacks AMD's own HIP libraries, as Debian packages them, under target/rocm, so that tests can
# load three major versions of them: ci/rocm-roots.sh [5.7|6.4|7.2]...
#
# Nothing is installed: apt works on state of its own, and each root holds the packages' files with
# the C library that they need (ci/with-rocm-root.sh runs programs on it). 5.7 is in a stable suite
# and has to be there; the others come from suites that change, and may be skipped. Prints a line
# for each.
set -euo pipefail
cd "$(dirname "$0")/.."

roots=$PWD/target/rocm
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Asks apt, with state in $scratch/VERSION, for packages of some suites.
apt_for() {
  local state=$scratch/$1
  shift
  apt-get -qq -o Dir::State="$state/state" -o Dir::State::status="$state/status" \
    -o Dir::Cache="$state/cache" -o Dir::Etc::SourceList="$state/sources.list" \
    -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::Preferences="$state/preferences" \
    -o Dir::Etc::PreferencesParts=/dev/null -o APT::Sandbox::User=root \
    -o APT::Update::Error-Mode=any -o APT::Install-Recommends=false "$@"
}

# unpack VERSION SUITES PACKAGE...: the packages and all that they need, C library included.
unpack() {
  local version=$1 suites=$2 state=$scratch/$1 partial=$roots/.$1 mirror suite archive
  shift 2
  rm -rf "$state" "$partial"
  mkdir -p "$state"/{state,cache} "$partial"
  touch "$state/status"
  # The mirror that this system uses for its own packages.
  mirror=$(apt-get --print-uris update | sed -n "s|^'\(.*/debian/\)dists/.*|\1|p" | sed 1q)
  for suite in $suites; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
  done >"$state/sources.list"
  # All of HIP from one suite, the rest from the steadier one.
  printf '%s\n' 'Package: libamdhip64* libhiprtc* libamd-comgr* libhsa-runtime*' \
    'Pin: release a=experimental' 'Pin-Priority: 900' >"$state/preferences"
  apt_for "$version" update &&
    apt_for "$version" --yes --download-only install "$@" >/dev/null || return
  for archive in "$state"/cache/archives/*.deb; do
    dpkg-deb --extract "$archive" "$partial" || return
  done
  mv "$partial" "$roots/$version"
}

# provide VERSION SUITES PACKAGE...: tries twice, as a mirror may be busy; fails when there is none.
provide() {
  local version=$1 log=$scratch/$1.log
  if [ ! -d "$roots/$version" ] && ! unpack "$@" >"$log" 2>&1 && ! unpack "$@" >"$log" 2>&1; then
    rm -rf "${roots:?}/.$version"
    echo "rocm $version: not available${optional:+, skipped}: $(grep -m 1 '^E: ' "$log" || tail -n 1 "$log")"
    return 1
  fi
  echo "rocm $version: available, $(cd "$roots/$version/usr/lib/x86_64-linux-gnu" && ls libamdhip64.so.*.*.*)"
}

[ $# -gt 0 ] || set -- 5.7 6.4 7.2
for version in "$@"; do
  case $version in
    5.7) provide 5.7 trixie 'libamdhip64-5=5.7*' libhiprtc-builtins5 libamdhip64-dev ;;
    6.4) optional=yes provide 6.4 forky 'libamdhip64-6=6.4*' libhiprtc6 libhiprtc-builtins6 libamdhip64-dev || true ;;
    7.2) optional=yes provide 7.2 'sid experimental' 'libamdhip64-7=7.2*' libhiprtc7 libhiprtc-builtins7 libamdhip64-dev || true ;;
    *) echo "rocm $version: known are 5.7, 6.4 and 7.2" >&2; exit 2 ;;
  esac
done
