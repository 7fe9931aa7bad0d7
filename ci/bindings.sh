#!/usr/bin/env bash
# Makes crates/hip-sys/src/generated/*.rs of the headers below ROOT, a folder that Debian's
# packages of HIP were unpacked into: ci/bindings.sh generate ROOT
# Needs bindgen (cargo install bindgen-cli --version 0.73.2) and a libclang (Debian: libclang1-14).
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
MemCreate|MemRelease|MemMap|MemUnmap|MemSetAccess|MemAddressReserve|MemAddressFree|MemGetAllocationGranularity
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

generate() {
    local root=$1
    include=$(mktemp -d)
    trap 'rm -rf "$include"' EXIT
    # Only these: the root has a C library of its own.
    cp -r "$root"/usr/include/{hip,amd_comgr} "$include"
    local hip comgr
    hip="HIP $(version_of "$include/hip/hip_version.h" HIP_VERSION)"
    comgr="comgr $(sed -n 's/^#define AMD_COMGR_INTERFACE_VERSION_\(MAJOR\|MINOR\)  *//p' "$include/amd_comgr/amd_comgr.h" | paste -sd.)"
    bindings hip HipLibrary "$hip, hip/hip_runtime_api.h" \
        --allowlist-function "hip(${hip_functions//$'\n'/|})" --allowlist-var "hip($hip_constants)"
    bindings hiprtc HiprtcLibrary "$hip, hip/hiprtc.h" \
        --allowlist-function 'hiprtc(Version|CreateProgram|DestroyProgram|CompileProgram|Get(ErrorString|Code|CodeSize|ProgramLog|ProgramLogSize))'
    bindings comgr ComgrLibrary "$comgr, amd_comgr/amd_comgr.h" \
        --allowlist-function 'amd_comgr_(get_version|get_isa_count|get_isa_name)'
    cargo fmt -p kvferry-hip-sys
}

"$@"
