//! libcuda and libnvrtc, found at run time. A function that a library does not have fails each call.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use hip_sys::hiprtc::{HIPRTC_ERROR_INTERNAL_ERROR, hiprtcProgram};
use hip_sys::*;
use libloading::Library;

use super::code::hip_code;
use crate::call::Result;

/// A table of functions, with a method for each. Types are HIP's where both have one layout; an
/// address is a pointer, and so is a context, a stream, and whatever else is a name.
macro_rules! symbols {
    ($table:ident, $translate:path, $missing:path; $(fn $symbol:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        pub(super) struct $table {
            $($symbol: Option<unsafe extern "C" fn($($type),*) -> c_uint>,)*
        }

        impl $table {
            /// # Safety
            /// The library is NVIDIA's.
            unsafe fn of(library: &Library) -> Self {
                // SAFETY: the caller's contract; the signatures are those of NVIDIA's headers.
                unsafe { Self { $($symbol: library.get(concat!(stringify!($symbol), "\0")).ok().map(|it| *it),)* } }
            }

            $(
                #[expect(clippy::allow_attributes, reason = "not all have so many arguments")]
                #[allow(clippy::too_many_arguments, reason = "the arguments of the C function")]
                /// # Safety
                /// As NVIDIA documents for the function.
                pub(super) unsafe fn $symbol(&self, $($arg: $type),*) -> Result {
                    let call = self.$symbol.ok_or($missing)?;
                    // SAFETY: the caller's contract.
                    match unsafe { call($($arg),*) } {
                        0 => Ok(()),
                        code => Err($translate(code)),
                    }
                }
            )*
        }
    };
}

symbols! { Cuda, hip_code, hipErrorSharedObjectSymbolNotFound;
    fn cuInit(flags: c_uint);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut hipUUID, device: c_int);
    fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    fn cuCtxSetCurrent(context: *mut c_void);
    fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: c_uint);
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut hipStreamCaptureMode);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(addr: *mut *mut c_void, bytes: usize);
    fn cuMemFree_v2(addr: *mut c_void);
    fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(host: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(addr: *mut *mut c_void, host: *mut c_void, flags: c_uint);
    fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(host: *mut c_void);
    fn cuPointerGetAttribute(value: *mut c_void, attribute: hipPointer_attribute, addr: *mut c_void);
    fn cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut hipPointer_attribute,
        values: *mut *mut c_void,
        addr: *mut c_void,
    );
    fn cuMemGetAddressRange_v2(base: *mut *mut c_void, bytes: *mut usize, addr: *mut c_void);
    fn cuIpcGetMemHandle(handle: *mut hipIpcMemHandle_t, addr: *mut c_void);
    fn cuIpcOpenMemHandle_v2(addr: *mut *mut c_void, handle: hipIpcMemHandle_t, flags: c_uint);
    fn cuIpcCloseMemHandle(addr: *mut c_void);
    fn cuStreamCreateWithPriority(stream: *mut hipStream_t, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: hipStream_t);
    fn cuStreamQuery(stream: hipStream_t);
    fn cuStreamSynchronize(stream: hipStream_t);
    fn cuStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint);
    fn cuStreamWriteValue32_v2(stream: hipStream_t, addr: *mut c_void, value: u32, flags: c_uint);
    fn cuStreamWaitValue32_v2(stream: hipStream_t, addr: *mut c_void, value: u32, flags: c_uint);
    fn cuStreamIsCapturing(stream: hipStream_t, status: *mut hipStreamCaptureStatus);
    fn cuStreamBeginCapture_v2(stream: hipStream_t, mode: hipStreamCaptureMode);
    fn cuStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t);
    fn cuGraphDestroy(graph: hipGraph_t);
    fn cuEventCreate(event: *mut hipEvent_t, flags: c_uint);
    fn cuEventDestroy_v2(event: hipEvent_t);
    fn cuEventRecord(event: hipEvent_t, stream: hipStream_t);
    fn cuEventQuery(event: hipEvent_t);
    fn cuEventSynchronize(event: hipEvent_t);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: hipEvent_t, stop: hipEvent_t);
    fn cuMemcpyAsync(dst: *mut c_void, src: *mut c_void, bytes: usize, stream: hipStream_t);
    fn cuMemcpy2DAsync_v2(copy: *const hip_Memcpy2D, stream: hipStream_t);
    fn cuMemsetD8Async(dst: *mut c_void, value: c_uchar, count: usize, stream: hipStream_t);
    fn cuMemsetD32Async(dst: *mut c_void, value: c_int, count: usize, stream: hipStream_t);
    fn cuModuleLoadData(module: *mut hipModule_t, image: *const c_void);
    fn cuModuleUnload(module: hipModule_t);
    fn cuModuleGetFunction(function: *mut hipFunction_t, module: hipModule_t, name: *const c_char);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: hipFunction_attribute, function: hipFunction_t);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: hipFunction_t,
        block_threads: c_int,
        shared_bytes: usize,
    );
    fn cuLaunchKernel(
        function: hipFunction_t,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: hipStream_t,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuMemGetAllocationGranularity(
        bytes: *mut usize,
        properties: *const hipMemAllocationProp,
        option: hipMemAllocationGranularity_flags,
    );
    fn cuMemCreate(
        handle: *mut hipMemGenericAllocationHandle_t,
        bytes: usize,
        properties: *const hipMemAllocationProp,
        flags: c_ulonglong,
    );
    fn cuMemRelease(handle: hipMemGenericAllocationHandle_t);
    fn cuMemRetainAllocationHandle(handle: *mut hipMemGenericAllocationHandle_t, addr: *mut c_void);
    fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut hipMemAllocationProp,
        handle: hipMemGenericAllocationHandle_t,
    );
    fn cuMemExportToShareableHandle(
        shared: *mut c_void,
        handle: hipMemGenericAllocationHandle_t,
        handle_type: hipMemAllocationHandleType,
        flags: c_ulonglong,
    );
    fn cuMemImportFromShareableHandle(
        handle: *mut hipMemGenericAllocationHandle_t,
        shared: *mut c_void,
        handle_type: hipMemAllocationHandleType,
    );
    fn cuMemAddressReserve(
        addr: *mut *mut c_void,
        bytes: usize,
        alignment: usize,
        wanted: *mut c_void,
        flags: c_ulonglong,
    );
    fn cuMemAddressFree(addr: *mut c_void, bytes: usize);
    fn cuMemMap(
        addr: *mut c_void,
        bytes: usize,
        offset: usize,
        handle: hipMemGenericAllocationHandle_t,
        flags: c_ulonglong,
    );
    fn cuMemUnmap(addr: *mut c_void, bytes: usize);
    fn cuMemSetAccess(addr: *mut c_void, bytes: usize, access: *const hipMemAccessDesc, count: usize);
    fn cuMemGetAccess(rights: *mut c_ulonglong, location: *const hipMemLocation, addr: *mut c_void);
    fn cuDeviceGetDefaultMemPool(pool: *mut hipMemPool_t, device: c_int);
    fn cuMemPoolCreate(pool: *mut hipMemPool_t, properties: *const hipMemPoolProps);
    fn cuMemPoolDestroy(pool: hipMemPool_t);
    fn cuMemPoolSetAccess(pool: hipMemPool_t, access: *const hipMemAccessDesc, count: usize);
    fn cuMemAllocFromPoolAsync(
        addr: *mut *mut c_void,
        bytes: usize,
        pool: hipMemPool_t,
        stream: hipStream_t,
    );
    fn cuMemFreeAsync(addr: *mut c_void, stream: hipStream_t);
    fn cuMemPoolExportToShareableHandle(
        shared: *mut c_void,
        pool: hipMemPool_t,
        handle_type: hipMemAllocationHandleType,
        flags: c_ulonglong,
    );
    fn cuMemPoolImportFromShareableHandle(
        pool: *mut hipMemPool_t,
        shared: *mut c_void,
        handle_type: hipMemAllocationHandleType,
        flags: c_ulonglong,
    );
    fn cuMemPoolExportPointer(data: *mut hipMemPoolPtrExportData, addr: *mut c_void);
    fn cuMemPoolImportPointer(
        addr: *mut *mut c_void,
        pool: hipMemPool_t,
        data: *mut hipMemPoolPtrExportData,
    );
}

/// NVRTC's codes are hipRTC's up to this one.
fn rtc_code(nvrtc: c_uint) -> c_uint {
    nvrtc.min(HIPRTC_ERROR_INTERNAL_ERROR)
}

symbols! { Nvrtc, rtc_code, HIPRTC_ERROR_INTERNAL_ERROR;
    fn nvrtcGetNumSupportedArchs(count: *mut c_int);
    fn nvrtcGetSupportedArchs(architectures: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut hiprtcProgram,
        source: *const c_char,
        name: *const c_char,
        header_count: c_int,
        headers: *const *const c_char,
        header_names: *const *const c_char,
    );
    fn nvrtcDestroyProgram(program: *mut hiprtcProgram);
    fn nvrtcCompileProgram(
        program: hiprtcProgram,
        option_count: c_int,
        options: *const *const c_char,
    );
    fn nvrtcGetProgramLogSize(program: hiprtcProgram, bytes: *mut usize);
    fn nvrtcGetProgramLog(program: hiprtcProgram, log: *mut c_char);
    fn nvrtcGetCUBINSize(program: hiprtcProgram, bytes: *mut usize);
    fn nvrtcGetCUBIN(program: hiprtcProgram, cubin: *mut c_char);
}

/// The first of these that can be opened; it stays loaded.
fn open(names: &[&str]) -> Option<Library> {
    // SAFETY: opening NVIDIA's libraries runs their constructors, which is what forwarding is for.
    names.iter().find_map(|name| unsafe { Library::new(*name) }.ok())
}

impl Cuda {
    /// libcuda, initialised.
    pub(super) fn load() -> Result<&'static Self> {
        static LOADED: OnceLock<Result<Cuda>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            let library = open(&["libcuda.so.1", "libcuda.so"]).ok_or(hipErrorNoDevice)?;
            // SAFETY: found by its name.
            let cuda = unsafe { Self::of(&library) };
            std::mem::forget(library);
            // SAFETY: may be called any number of times.
            unsafe { cuda.cuInit(0) }?;
            Ok(cuda)
        });
        loaded.as_ref().map_err(|code| *code)
    }
}

impl Nvrtc {
    pub(super) fn load() -> Result<&'static Self> {
        static LOADED: OnceLock<Option<Nvrtc>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            let library = open(&["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"])?;
            // SAFETY: found by its name.
            let nvrtc = unsafe { Self::of(&library) };
            std::mem::forget(library);
            Some(nvrtc)
        });
        loaded.as_ref().ok_or(HIPRTC_ERROR_INTERNAL_ERROR)
    }
}
