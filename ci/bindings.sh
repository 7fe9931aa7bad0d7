#!/usr/bin/env bash
# The bindings of crates/hip-sys, from headers below ROOT, a folder of ci/rocm-roots.sh.
#
# ci/bindings.sh generate ROOT      makes crates/hip-sys/src/generated; needs bindgen (cargo install
#                                   bindgen-cli --version 0.73.2) and libclang (Debian: libclang1-14)
# ci/bindings.sh check [ROOT...]    compares sizes, offsets and constants with the headers of each
#                                   version; needs a C++ compiler; by default all of target/rocm
set -euo pipefail
cd "$(dirname "$0")/.."
crate=crates/hip-sys

hip_functions='Init|RuntimeGetVersion|DriverGetVersion|GetErrorName|GetErrorString|GetLastError|PeekAtLastError
GetDeviceCount|GetDevice|SetDevice|DeviceGet|DeviceGetName|DeviceGetUuid|DeviceGetPCIBusId|DeviceTotalMem
DeviceGetAttribute|GetDeviceProperties|GetDevicePropertiesR0600|DeviceCanAccessPeer|DeviceEnablePeerAccess
ExtGetLinkTypeAndHopCount|DeviceGetStreamPriorityRange|ThreadExchangeStreamCaptureMode
Malloc|Free|MemGetInfo|HostMalloc|HostFree|HostRegister|HostUnregister|HostGetDevicePointer
PointerGetAttributes|PointerGetAttribute|DrvPointerGetAttributes|MemGetAddressRange
IpcGetMemHandle|IpcOpenMemHandle|IpcCloseMemHandle
StreamCreateWithPriority|StreamDestroy|StreamSynchronize|StreamQuery|StreamWaitEvent|StreamGetDevice
ExtStreamCreateWithCUMask|StreamWriteValue32|StreamWaitValue32|StreamIsCapturing|StreamBeginCapture|StreamEndCapture
GraphDestroy|EventCreateWithFlags|EventDestroy|EventRecord|EventQuery|EventSynchronize|EventElapsedTime
MemcpyAsync|MemcpyDtoHAsync|MemcpyHtoDAsync|MemcpyDtoDAsync|Memcpy2DAsync|MemcpyParam2DAsync|MemcpyBatchAsync
MemsetD8Async|MemsetD32Async
ModuleLoadData|ModuleUnload|ModuleGetFunction|ModuleLaunchKernel|FuncGetAttribute
ModuleOccupancyMaxActiveBlocksPerMultiprocessor
MemCreate|MemRelease|MemMap|MemUnmap|MemSetAccess|MemGetAccess|MemAddressReserve|MemAddressFree|MemGetAllocationGranularity
MemExportToShareableHandle|MemImportFromShareableHandle|MemRetainAllocationHandle
MemGetAllocationPropertiesFromHandle|MemGetHandleForAddressRange
MemPoolCreate|MemPoolDestroy|MemPoolSetAccess|MemPoolExportToShareableHandle|MemPoolImportFromShareableHandle
MemPoolExportPointer|MemPoolImportPointer|DeviceGetDefaultMemPool|MallocFromPoolAsync|FreeAsync'
hip_constants='(HostMalloc|HostRegister|Event|Stream|IpcMem)[A-Z][A-Za-z0-9]*'

# bindings NAME STRUCT SOURCE BINDGEN_ARGUMENT... : src/generated/NAME.rs
bindings() {
    local name=$1 table=$2 source=$3
    shift 3
    bindgen "$crate/headers/$name.h" --dynamic-loading "$table" --use-core --no-doc-comments \
        --default-enum-style consts --no-prepend-enum-name --wrap-unsafe-ops --formatter none \
        --raw-line "// $source, $(bindgen --version); made by ci/bindings.sh" --disable-header-comment \
        -o "$crate/src/generated/$name.rs" "$@" -- -D__HIP_PLATFORM_AMD__=1 -I"$include"
}

# version_of HEADER PREFIX : the three numbers that a header defines
version_of() {
    local part
    for part in MAJOR MINOR PATCH; do
        sed -n "s/^#define $2_$part  *//p" "$1"
    done | paste -sd.
}

# headers_of ROOT : copies what is needed to $include; the root has a C library of its own.
headers_of() {
    rm -rf "$include"
    mkdir "$include"
    cp -r "$1"/usr/include/{hip,amd_comgr} "$include"
}

generate() {
    local hip comgr
    headers_of "$1"
    hip="HIP $(version_of "$include/hip/hip_version.h" HIP_VERSION)"
    comgr="comgr $(sed -n 's/^#define AMD_COMGR_INTERFACE_VERSION_\(MAJOR\|MINOR\)  *//p' "$include/amd_comgr/amd_comgr.h" | paste -sd.)"
    bindings hip HipLibrary "$hip, hip/hip_runtime_api.h" \
        --allowlist-function "hip(${hip_functions//$'\n'/|})" --allowlist-var "hip($hip_constants)"
    bindings hiprtc HiprtcLibrary "$hip, hip/hiprtc.h" \
        --allowlist-function 'hiprtc(Version|CreateProgram|DestroyProgram|CompileProgram|Get(ErrorString|Code|CodeSize|ProgramLog|ProgramLogSize))'
    bindings comgr ComgrLibrary "$comgr, amd_comgr/amd_comgr.h" \
        --allowlist-function 'amd_comgr_(get_isa_count|get_isa_name|get_isa_metadata|destroy_metadata)'
    cargo fmt -p kvferry-hip-sys
}

# What bindgen saw, as C++: `WORD WORD...|CONDITION`, one a line; the words are its names.
conditions() {
    tr -s ' \n' ' ' <"$crate/src/generated/$1.rs" | tr ';' '\n' | sed -E 's/\( /(/g; s/,? \)/)/g' | sed -nE '
        /__bindgen|__Bindgen/d
        s/.*size_of::<(\w+)>\(\) - ([0-9]+)usize.*/\1|sizeof(\1) == \2/p
        s/.*offset_of!\((\w+), (\w+)\) - ([0-9]+)usize.*/\1 \2|offsetof(\1, \2) == \3/p
        s/.*pub const (\w+): [a-z]\w+ = (-?[0-9]+).*/\1|\1 == \2/p' |
        sed 's/\btype_\b/type/g'
}

# What crates/hip-sys/src/lib.rs says of HIP 5 instead, in the same form.
conditions_of_hip5() {
    local constant='s/.*pub const NAME: \w+ = ([0-9]+).*/\1/p' library=$crate/src/lib.rs
    value() { sed -nE "${constant/NAME/$1}" "$library"; }
    echo "hipDeviceProp_t gcnArchName|offsetof(hipDeviceProp_t, gcnArchName) == $(value ARCHITECTURE_OFFSET_HIP5)"
    echo "hipDeviceProp_t|sizeof(hipDeviceProp_t) <= $(value DEVICE_PROPERTIES_BYTES)"
    echo "hipIpcMemLazyEnablePeerAccess|hipIpcMemLazyEnablePeerAccess == $(value IPC_MEM_LAZY_ENABLE_PEER_ACCESS_HIP5)"
    echo "hipMemoryTypeHost|hipMemoryTypeHost == $(value HOST)"
    echo "hipMemoryTypeDevice|hipMemoryTypeDevice == $(value DEVICE)"
    echo "hipMemoryTypeManaged|hipMemoryTypeManaged == $(value MANAGED)"
}

# check_header NAME MAJOR : one header against the bindings of it.
check_header() {
    local source=$include/$1.cpp words condition word checked=0 absent=0
    {
        echo '#include <cstddef>'
        cat "$crate/headers/$1.h"
        echo
    } >"$source"
    while IFS='|' read -r words condition; do
        for word in $words; do
            grep -rqw "$word" "$include"/{hip,amd_comgr} || { absent=$((absent + 1)); continue 2; }
        done
        echo "static_assert($condition, \"\");" >>"$source"
        checked=$((checked + 1))
    done < <(
        if [ "$1" = hip ] && [ "$2" -le 5 ]; then
            # `type` is `memoryType` there, a part of `reserved` has a name by now, and the
            # constants have other values.
            conditions hip | grep -vE '^(hipMemoryType|hipIpcMemLazy)|^hipPointerAttribute_t type|^hipMemPoolProps reserved'
            echo 'hipPointerAttribute_t memoryType|offsetof(hipPointerAttribute_t, memoryType) == 0'
            conditions_of_hip5
        else
            conditions "$1"
        fi
    )
    [ "$checked" -gt 0 ] &&
        "${CXX:-c++}" -std=c++17 -fsyntax-only -w -D__HIP_PLATFORM_AMD__=1 -I"$include" "$source" || return
    echo "  $1: $checked agree, $absent are not in this version"
}

check() {
    local root version header failed=0
    [ $# -gt 0 ] || set -- target/rocm/{5.7,6.4,7.2}
    for root in "$@"; do
        if [ ! -d "$root/usr/include/hip" ]; then
            echo "$root: no headers, skipped"
            continue
        fi
        headers_of "$root"
        version=$(version_of "$include/hip/hip_version.h" HIP_VERSION)
        echo "HIP $version"
        for header in hip hiprtc comgr; do
            check_header $header "${version%%.*}" || failed=1
        done
    done
    return $failed
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
include=$scratch/include
"$@"
