//! The functions, by AMD's names; the compiler compares each signature with AMD's headers.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use hip_sys::comgr::{ComgrLibrary, amd_comgr_metadata_node_t, amd_comgr_status_t};
use hip_sys::hiprtc::{HiprtcLibrary, hiprtcProgram, hiprtcResult};
use hip_sys::*;

use crate::faults::Calls;
use crate::settings::{Mode, mode};
use crate::{call, errors};
use crate::{forwarding, simulated};

/// Exports functions, each answered by one of the same name.
macro_rules! exports {
    ($table:ty, $result:ty, $around:path; $(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> $result {
                static CALLS: Calls = Calls::new();
                $around(stringify!($name), &CALLS, || {
                    // SAFETY: the caller's contract, which is AMD's.
                    unsafe {
                        match mode() {
                            Mode::Simulated => simulated::$name($($arg),*),
                            Mode::Forwarding => forwarding::$name($($arg),*),
                        }
                    }
                })
            }
        )*

        const _: fn(&mut $table) = |table| { $(table.$name = Ok($name);)* };

        /// Names of these functions.
        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

pub(crate) mod hip {
    use super::*;

    exports! { HipLibrary, hipError_t, call::hip;
        fn hipInit(flags: c_uint);
        fn hipDriverGetVersion(version: *mut c_int);
        fn hipRuntimeGetVersion(version: *mut c_int);
        fn hipDeviceGet(device: *mut hipDevice_t, ordinal: c_int);
        fn hipDeviceGetName(name: *mut c_char, len: c_int, device: hipDevice_t);
        fn hipDeviceGetUuid(uuid: *mut hipUUID, device: hipDevice_t);
        fn hipDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int);
        fn hipDeviceTotalMem(bytes: *mut usize, device: hipDevice_t);
        fn hipSetDevice(device: c_int);
        fn hipGetDevice(device: *mut c_int);
        fn hipGetDeviceCount(count: *mut c_int);
        fn hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, device: c_int);
        fn hipDeviceGetDefaultMemPool(pool: *mut hipMemPool_t, device: c_int);
        fn hipGetDevicePropertiesR0600(properties: *mut hipDeviceProp_tR0600, device: c_int);
        fn hipExtGetLinkTypeAndHopCount(
            device1: c_int, device2: c_int, link: *mut u32, hops: *mut u32
        );
        fn hipIpcGetMemHandle(handle: *mut hipIpcMemHandle_t, addr: *mut c_void);
        fn hipIpcOpenMemHandle(addr: *mut *mut c_void, handle: hipIpcMemHandle_t, flags: c_uint);
        fn hipIpcCloseMemHandle(addr: *mut c_void);
        fn hipStreamCreateWithPriority(stream: *mut hipStream_t, flags: c_uint, priority: c_int);
        fn hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
        fn hipStreamDestroy(stream: hipStream_t);
        fn hipStreamQuery(stream: hipStream_t);
        fn hipStreamSynchronize(stream: hipStream_t);
        fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint);
        fn hipStreamGetDevice(stream: hipStream_t, device: *mut hipDevice_t);
        fn hipExtStreamCreateWithCUMask(
            stream: *mut hipStream_t, mask_words: u32, mask: *const u32
        );
        fn hipStreamWaitValue32(
            stream: hipStream_t, addr: *mut c_void, value: u32, flags: c_uint, mask: u32
        );
        fn hipStreamWriteValue32(stream: hipStream_t, addr: *mut c_void, value: u32, flags: c_uint);
        fn hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint);
        fn hipEventRecord(event: hipEvent_t, stream: hipStream_t);
        fn hipEventDestroy(event: hipEvent_t);
        fn hipEventSynchronize(event: hipEvent_t);
        fn hipEventElapsedTime(milliseconds: *mut f32, start: hipEvent_t, stop: hipEvent_t);
        fn hipEventQuery(event: hipEvent_t);
        fn hipPointerGetAttributes(attributes: *mut hipPointerAttribute_t, addr: *const c_void);
        fn hipPointerGetAttribute(
            data: *mut c_void, attribute: hipPointer_attribute, addr: hipDeviceptr_t
        );
        fn hipDrvPointerGetAttributes(
            count: c_uint, attributes: *mut hipPointer_attribute, data: *mut *mut c_void,
            addr: hipDeviceptr_t
        );
        fn hipMalloc(addr: *mut *mut c_void, bytes: usize);
        fn hipHostMalloc(addr: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn hipFreeAsync(addr: *mut c_void, stream: hipStream_t);
        fn hipMemPoolSetAccess(pool: hipMemPool_t, access: *const hipMemAccessDesc, count: usize);
        fn hipMemPoolCreate(pool: *mut hipMemPool_t, properties: *const hipMemPoolProps);
        fn hipMemPoolDestroy(pool: hipMemPool_t);
        fn hipMallocFromPoolAsync(
            addr: *mut *mut c_void, bytes: usize, pool: hipMemPool_t, stream: hipStream_t
        );
        fn hipMemPoolExportToShareableHandle(
            shared_handle: *mut c_void, pool: hipMemPool_t, handle_type: hipMemAllocationHandleType,
            flags: c_uint
        );
        fn hipMemPoolImportFromShareableHandle(
            pool: *mut hipMemPool_t, shared_handle: *mut c_void,
            handle_type: hipMemAllocationHandleType, flags: c_uint
        );
        fn hipMemPoolExportPointer(data: *mut hipMemPoolPtrExportData, addr: *mut c_void);
        fn hipMemPoolImportPointer(
            addr: *mut *mut c_void, pool: hipMemPool_t, data: *mut hipMemPoolPtrExportData
        );
        fn hipHostGetDevicePointer(addr: *mut *mut c_void, host: *mut c_void, flags: c_uint);
        fn hipHostRegister(host: *mut c_void, bytes: usize, flags: c_uint);
        fn hipHostUnregister(host: *mut c_void);
        fn hipFree(addr: *mut c_void);
        fn hipHostFree(addr: *mut c_void);
        fn hipMemcpyHtoDAsync(
            dst: hipDeviceptr_t, src: *const c_void, bytes: usize, stream: hipStream_t
        );
        fn hipMemcpyDtoHAsync(
            dst: *mut c_void, src: hipDeviceptr_t, bytes: usize, stream: hipStream_t
        );
        fn hipMemcpyDtoDAsync(
            dst: hipDeviceptr_t, src: hipDeviceptr_t, bytes: usize, stream: hipStream_t
        );
        fn hipMemcpyAsync(
            dst: *mut c_void, src: *const c_void, bytes: usize, kind: hipMemcpyKind,
            stream: hipStream_t
        );
        fn hipMemsetD8Async(dst: hipDeviceptr_t, value: c_uchar, count: usize, stream: hipStream_t);
        fn hipMemsetD32Async(dst: hipDeviceptr_t, value: c_int, count: usize, stream: hipStream_t);
        fn hipMemGetInfo(free: *mut usize, total: *mut usize);
        fn hipMemcpyParam2DAsync(copy: *const hip_Memcpy2D, stream: hipStream_t);
        fn hipMemcpy2DAsync(
            dst: *mut c_void, dst_pitch: usize, src: *const c_void, src_pitch: usize, width: usize,
            height: usize, kind: hipMemcpyKind, stream: hipStream_t
        );
        fn hipMemGetAddressRange(
            base: *mut hipDeviceptr_t, bytes: *mut usize, addr: hipDeviceptr_t
        );
        fn hipMemcpyBatchAsync(
            dsts: *mut *mut c_void, srcs: *mut *mut c_void, sizes: *mut usize, count: usize,
            attributes: *mut hipMemcpyAttributes, attribute_indices: *mut usize,
            attribute_count: usize, failed: *mut usize, stream: hipStream_t
        );
        fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
        fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint);
        fn hipModuleUnload(module: hipModule_t);
        fn hipModuleGetFunction(
            function: *mut hipFunction_t, module: hipModule_t, name: *const c_char
        );
        fn hipFuncGetAttribute(
            value: *mut c_int, attribute: hipFunction_attribute, function: hipFunction_t
        );
        fn hipModuleLoadData(module: *mut hipModule_t, image: *const c_void);
        fn hipModuleLaunchKernel(
            function: hipFunction_t, grid_dim_x: c_uint, grid_dim_y: c_uint, grid_dim_z: c_uint,
            block_dim_x: c_uint, block_dim_y: c_uint, block_dim_z: c_uint, shared_bytes: c_uint,
            stream: hipStream_t, arguments: *mut *mut c_void, extra: *mut *mut c_void
        );
        fn hipMemGetHandleForAddressRange(
            handle: *mut c_void, addr: hipDeviceptr_t, bytes: usize,
            handle_type: hipMemRangeHandleType, flags: c_ulonglong
        );
        fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int, function: hipFunction_t, block_threads: c_int, shared_bytes: usize
        );
        fn hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode);
        fn hipStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t);
        fn hipStreamIsCapturing(stream: hipStream_t, status: *mut hipStreamCaptureStatus);
        fn hipThreadExchangeStreamCaptureMode(mode: *mut hipStreamCaptureMode);
        fn hipGraphDestroy(graph: hipGraph_t);
        fn hipMemAddressFree(addr: *mut c_void, bytes: usize);
        fn hipMemAddressReserve(
            addr: *mut *mut c_void, bytes: usize, alignment: usize, wanted: *mut c_void,
            flags: c_ulonglong
        );
        fn hipMemCreate(
            handle: *mut hipMemGenericAllocationHandle_t, bytes: usize,
            properties: *const hipMemAllocationProp, flags: c_ulonglong
        );
        fn hipMemExportToShareableHandle(
            shared_handle: *mut c_void, handle: hipMemGenericAllocationHandle_t,
            handle_type: hipMemAllocationHandleType, flags: c_ulonglong
        );
        fn hipMemGetAccess(
            rights: *mut c_ulonglong, location: *const hipMemLocation, addr: *mut c_void
        );
        fn hipMemGetAllocationGranularity(
            granularity: *mut usize, properties: *const hipMemAllocationProp,
            option: hipMemAllocationGranularity_flags
        );
        fn hipMemGetAllocationPropertiesFromHandle(
            properties: *mut hipMemAllocationProp, handle: hipMemGenericAllocationHandle_t
        );
        fn hipMemImportFromShareableHandle(
            handle: *mut hipMemGenericAllocationHandle_t, shared_handle: *mut c_void,
            handle_type: hipMemAllocationHandleType
        );
        fn hipMemMap(
            addr: *mut c_void, bytes: usize, offset: usize, handle: hipMemGenericAllocationHandle_t,
            flags: c_ulonglong
        );
        fn hipMemRelease(handle: hipMemGenericAllocationHandle_t);
        fn hipMemRetainAllocationHandle(
            handle: *mut hipMemGenericAllocationHandle_t, addr: *mut c_void
        );
        fn hipMemSetAccess(
            addr: *mut c_void, bytes: usize, access: *const hipMemAccessDesc, count: usize
        );
        fn hipMemUnmap(addr: *mut c_void, bytes: usize);
        fn hipGetDeviceProperties(properties: *mut c_void, device: c_int);
    }

    #[unsafe(no_mangle)]
    extern "C" fn hipGetLastError() -> hipError_t {
        call::take_last_error()
    }

    #[unsafe(no_mangle)]
    extern "C" fn hipPeekAtLastError() -> hipError_t {
        call::last_error()
    }

    #[unsafe(no_mangle)]
    extern "C" fn hipGetErrorName(code: hipError_t) -> *const c_char {
        errors::hip_name(code).unwrap_or(c"hipErrorUnknown").as_ptr()
    }

    #[unsafe(no_mangle)]
    extern "C" fn hipGetErrorString(code: hipError_t) -> *const c_char {
        errors::hip_name(code).unwrap_or(c"hipErrorUnknown").as_ptr()
    }
}

pub(crate) mod hiprtc {
    use super::*;

    exports! { HiprtcLibrary, hiprtcResult, call::plain;
        fn hiprtcVersion(major: *mut c_int, minor: *mut c_int);
        fn hiprtcCompileProgram(
            program: hiprtcProgram, option_count: c_int, options: *const *const c_char
        );
        fn hiprtcCreateProgram(
            program: *mut hiprtcProgram, src: *const c_char, name: *const c_char,
            header_count: c_int, headers: *const *const c_char, header_names: *const *const c_char
        );
        fn hiprtcDestroyProgram(program: *mut hiprtcProgram);
        fn hiprtcGetProgramLog(program: hiprtcProgram, log: *mut c_char);
        fn hiprtcGetProgramLogSize(program: hiprtcProgram, bytes: *mut usize);
        fn hiprtcGetCode(program: hiprtcProgram, code: *mut c_char);
        fn hiprtcGetCodeSize(program: hiprtcProgram, bytes: *mut usize);
    }

    #[unsafe(no_mangle)]
    extern "C" fn hiprtcGetErrorString(code: hiprtcResult) -> *const c_char {
        errors::hiprtc_name(code).unwrap_or(c"HIPRTC_ERROR_UNKNOWN").as_ptr()
    }
}

pub(crate) mod comgr {
    use super::*;

    exports! { ComgrLibrary, amd_comgr_status_t, call::plain;
        fn amd_comgr_get_isa_count(count: *mut usize);
        fn amd_comgr_get_isa_name(index: usize, isa_name: *mut *const c_char);
        fn amd_comgr_get_isa_metadata(
            isa_name: *const c_char, metadata: *mut amd_comgr_metadata_node_t
        );
        fn amd_comgr_destroy_metadata(metadata: amd_comgr_metadata_node_t);
    }
}
