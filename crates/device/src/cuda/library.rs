//! libcuda and libnvrtc as tables of functions that are found at run time.
//!
//! All symbols are looked up once, before the first call, so a missing one is a value. cudarc's
//! own wrappers panic instead, and their result enums turn a code that is newer than the bindings
//! into undefined behaviour; here a code is a number. cudarc finds the libraries and gives the
//! types, and the compiler compares every signature below with its bindings.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt::{self, Display};
use std::sync::OnceLock;

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc_sys;

use crate::error::{Error, Result};

/// A call that did not return success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) call: &'static str,
    pub(super) code: c_int,
}

impl Failure {
    pub(super) fn is(self, result: sys::CUresult) -> bool {
        self.code == result as c_int
    }
}

/// The driver's own word for a symbol that it does not have.
const NO_SYMBOL: c_int = sys::CUresult::CUDA_ERROR_NOT_FOUND as c_int;

/// A table with one field and one method of the same name for each symbol.
macro_rules! symbols {
    (
        $table:ident from $sys:ident, $library:literal, $result:ty;
        { $($(#[older = $older:literal])? $symbol:ident($($arg:ident: $type:ty),*);)* }
        optional { $($optional:ident($($optional_arg:ident: $optional_type:ty),*);)* }
        unchecked { $($unchecked:ident($($unchecked_arg:ident: $unchecked_type:ty),*);)* }
    ) => {
        $(const _: unsafe fn($($type),*) -> $result = $sys::$symbol;)*
        $(const _: unsafe fn($($optional_type),*) -> $result = $sys::$optional;)*

        #[expect(non_snake_case, reason = "the names of the C functions")]
        #[cfg_attr(not(feature = "testing"), allow(dead_code, reason = "tests call more of them"))]
        pub(super) struct $table {
            $($symbol: unsafe extern "C" fn($($type),*) -> c_int,)*
            $($optional: Option<unsafe extern "C" fn($($optional_type),*) -> c_int>,)*
            $($unchecked: unsafe extern "C" fn($($unchecked_type),*) -> c_int,)*
        }

        impl $table {
            pub(super) const LIBRARY: &'static str = $library;

            /// The table; the library stays loaded for the life of the process.
            pub(super) fn load() -> Result<&'static Self> {
                static TABLE: OnceLock<$table> = OnceLock::new();
                if let Some(table) = TABLE.get() {
                    return Ok(table);
                }
                // SAFETY: opening NVIDIA's library runs its constructors, which is what a user of
                // the `cuda` feature asks for.
                if !unsafe { $sys::is_culib_present() } {
                    return Err(Error::LibraryMissing {
                        library: Self::LIBRARY,
                        reason: "no file of that name, nor of another version of it, can be opened".into(),
                    });
                }
                // SAFETY: as above; it is present, so this does not panic.
                let library = unsafe { $sys::culib() };
                let missing = |symbol| Error::SymbolMissing { library: Self::LIBRARY, symbol };
                // SAFETY: the library is never closed, so the pointers do not dangle, and the
                // signatures are those of NVIDIA's headers: the constants above compare them.
                let table = unsafe {
                    Self {
                        $($symbol: match library.get(concat!(stringify!($symbol), "\0").as_bytes()) {
                            Ok(symbol) => *symbol,
                            $(Err(_) if library.get::<unsafe extern "C" fn()>($older).is_ok() => {
                                *library.get($older).map_err(|_| missing(stringify!($symbol)))?
                            })?
                            Err(_) => return Err(missing(stringify!($symbol))),
                        },)*
                        $($optional: library
                            .get(concat!(stringify!($optional), "\0").as_bytes())
                            .ok()
                            .map(|symbol| *symbol),)*
                        $($unchecked: *library
                            .get(concat!(stringify!($unchecked), "\0").as_bytes())
                            .map_err(|_| missing(stringify!($unchecked)))?,)*
                    }
                };
                Ok(TABLE.get_or_init(|| table))
            }
        }

        #[expect(non_snake_case, reason = "the names of the C functions")]
        #[cfg_attr(not(feature = "testing"), allow(dead_code, reason = "tests call more of them"))]
        #[allow(clippy::too_many_arguments, reason = "the arguments of the C functions; not all tables have so many")]
        impl $table {
            $(
                /// # Safety
                /// As NVIDIA documents for the function.
                pub(super) unsafe fn $symbol(&self, $($arg: $type),*) -> Result<(), Failure> {
                    // SAFETY: the caller's contract.
                    match unsafe { (self.$symbol)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(Failure { call: stringify!($symbol), code }),
                    }
                }
            )*
            $(
                /// Fails with [`NO_SYMBOL`] where the library is older than the function.
                ///
                /// # Safety
                /// As NVIDIA documents for the function.
                pub(super) unsafe fn $optional(&self, $($optional_arg: $optional_type),*) -> Result<(), Failure> {
                    // SAFETY: the caller's contract.
                    match self.$optional.map_or(NO_SYMBOL, |call| unsafe { call($($optional_arg),*) }) {
                        0 => Ok(()),
                        code => Err(Failure { call: stringify!($optional), code }),
                    }
                }
            )*
        }

        impl fmt::Debug for $table {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(Self::LIBRARY)
            }
        }
    };
}

symbols! {
    Cuda from sys, "libcuda.so.1", sys::CUresult; {
        cuInit(flags: c_uint);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
        cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
        #[older = b"cuDeviceGetUuid\0"]
        cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: sys::CUdevice);
        cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: sys::CUdevice);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
        cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
        cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
        cuCtxPushCurrent_v2(context: sys::CUcontext);
        cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
        cuCtxEnablePeerAccess(peer: sys::CUcontext, flags: c_uint);
        cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
        cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode);
        cuMemAlloc_v2(addr: *mut sys::CUdeviceptr, bytes: usize);
        cuMemFree_v2(addr: sys::CUdeviceptr);
        cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemFreeHost(host: *mut c_void);
        cuMemHostGetDevicePointer_v2(addr: *mut sys::CUdeviceptr, host: *mut c_void, flags: c_uint);
        cuPointerGetAttributes(
            count: c_uint,
            attributes: *mut sys::CUpointer_attribute,
            values: *mut *mut c_void,
            addr: sys::CUdeviceptr
        );
        cuIpcGetMemHandle(handle: *mut sys::CUipcMemHandle, addr: sys::CUdeviceptr);
        cuIpcOpenMemHandle_v2(addr: *mut sys::CUdeviceptr, handle: sys::CUipcMemHandle, flags: c_uint);
        cuIpcCloseMemHandle(addr: sys::CUdeviceptr);
        cuMemGetAddressRange_v2(base: *mut sys::CUdeviceptr, bytes: *mut usize, addr: sys::CUdeviceptr);
        cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint);
        cuMemHostUnregister(host: *mut c_void);
        cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
        cuStreamDestroy_v2(stream: sys::CUstream);
        cuStreamSynchronize(stream: sys::CUstream);
        cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
        cuEventDestroy_v2(event: sys::CUevent);
        cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
        cuEventQuery(event: sys::CUevent);
        cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
        #[older = b"cuStreamWriteValue32\0"]
        cuStreamWriteValue32_v2(stream: sys::CUstream, addr: sys::CUdeviceptr, value: sys::cuuint32_t, flags: c_uint);
        cuStreamIsCapturing(stream: sys::CUstream, status: *mut sys::CUstreamCaptureStatus);
        cuEventSynchronize(event: sys::CUevent);
        #[older = b"cuEventElapsedTime\0"]
        cuEventElapsedTime_v2(milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent);
        cuMemcpyAsync(dst: sys::CUdeviceptr, src: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        cuStreamWaitValue32_v2(stream: sys::CUstream, addr: sys::CUdeviceptr, value: sys::cuuint32_t, flags: c_uint);
        cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
        cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
        cuGraphDestroy(graph: sys::CUgraph);
        cuMemsetD8Async(addr: sys::CUdeviceptr, value: u8, count: usize, stream: sys::CUstream);
        cuMemcpy2DAsync_v2(copy: *const sys::CUDA_MEMCPY2D, stream: sys::CUstream);
        cuMemsetD32Async(addr: sys::CUdeviceptr, value: c_uint, count: usize, stream: sys::CUstream);
        cuMemcpyHtoDAsync_v2(dst: sys::CUdeviceptr, src: *const c_void, bytes: usize, stream: sys::CUstream);
        cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
        cuModuleUnload(module: sys::CUmodule);
        cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: sys::CUfunction, block_threads: c_int, shared_bytes: usize);
        cuFuncGetAttribute(value: *mut c_int, attribute: sys::CUfunction_attribute, function: sys::CUfunction);
        cuLaunchKernel(
            function: sys::CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint,
            stream: sys::CUstream,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void
        );
    }
    optional {
        cuDriverGetVersion(version: *mut c_int);
        cuGraphInstantiateWithFlags(
            executable: *mut sys::CUgraphExec,
            graph: sys::CUgraph,
            flags: c_ulonglong
        );
        cuGraphLaunch(executable: sys::CUgraphExec, stream: sys::CUstream);
        cuGraphExecDestroy(executable: sys::CUgraphExec);
        cuMemRetainAllocationHandle(handle: *mut sys::CUmemGenericAllocationHandle, addr: *mut c_void);
        cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
        cuMemGetAllocationPropertiesFromHandle(
            properties: *mut sys::CUmemAllocationProp,
            handle: sys::CUmemGenericAllocationHandle
        );
        cuMemExportToShareableHandle(
            shared: *mut c_void,
            handle: sys::CUmemGenericAllocationHandle,
            kind: sys::CUmemAllocationHandleType,
            flags: c_ulonglong
        );
        cuMemImportFromShareableHandle(
            handle: *mut sys::CUmemGenericAllocationHandle,
            shared: *mut c_void,
            kind: sys::CUmemAllocationHandleType
        );
        cuMemAddressReserve(
            addr: *mut sys::CUdeviceptr,
            bytes: usize,
            alignment: usize,
            wanted: sys::CUdeviceptr,
            flags: c_ulonglong
        );
        cuMemAddressFree(addr: sys::CUdeviceptr, bytes: usize);
        cuMemMap(
            addr: sys::CUdeviceptr,
            bytes: usize,
            offset: usize,
            handle: sys::CUmemGenericAllocationHandle,
            flags: c_ulonglong
        );
        cuMemUnmap(addr: sys::CUdeviceptr, bytes: usize);
        cuMemSetAccess(
            addr: sys::CUdeviceptr,
            bytes: usize,
            access: *const sys::CUmemAccessDesc,
            count: usize
        );
        cuMemPoolExportToShareableHandle(
            shared: *mut c_void,
            pool: sys::CUmemoryPool,
            kind: sys::CUmemAllocationHandleType,
            flags: c_ulonglong
        );
        cuMemPoolImportFromShareableHandle(
            pool: *mut sys::CUmemoryPool,
            shared: *mut c_void,
            kind: sys::CUmemAllocationHandleType,
            flags: c_ulonglong
        );
        cuMemPoolExportPointer(data: *mut sys::CUmemPoolPtrExportData, addr: sys::CUdeviceptr);
        cuMemPoolImportPointer(
            addr: *mut sys::CUdeviceptr,
            pool: sys::CUmemoryPool,
            data: *mut sys::CUmemPoolPtrExportData
        );
        cuMemPoolSetAccess(pool: sys::CUmemoryPool, access: *const sys::CUmemAccessDesc, count: usize);
        cuMemPoolDestroy(pool: sys::CUmemoryPool);
    }
    unchecked { cuGetErrorName(code: c_int, name: *mut *const c_char); }
}

symbols! {
    Nvrtc from nvrtc_sys, "libnvrtc.so", nvrtc_sys::nvrtcResult; {
        nvrtcVersion(major: *mut c_int, minor: *mut c_int);
        nvrtcGetNumSupportedArchs(count: *mut c_int);
        nvrtcGetSupportedArchs(architectures: *mut c_int);
        nvrtcCreateProgram(
            program: *mut nvrtc_sys::nvrtcProgram,
            source: *const c_char,
            name: *const c_char,
            header_count: c_int,
            headers: *const *const c_char,
            header_names: *const *const c_char
        );
        nvrtcDestroyProgram(program: *mut nvrtc_sys::nvrtcProgram);
        nvrtcCompileProgram(program: nvrtc_sys::nvrtcProgram, option_count: c_int, options: *const *const c_char);
        nvrtcGetProgramLogSize(program: nvrtc_sys::nvrtcProgram, bytes: *mut usize);
        nvrtcGetProgramLog(program: nvrtc_sys::nvrtcProgram, log: *mut c_char);
        nvrtcGetCUBINSize(program: nvrtc_sys::nvrtcProgram, bytes: *mut usize);
        nvrtcGetCUBIN(program: nvrtc_sys::nvrtcProgram, cubin: *mut c_char);
        nvrtcGetPTXSize(program: nvrtc_sys::nvrtcProgram, bytes: *mut usize);
        nvrtcGetPTX(program: nvrtc_sys::nvrtcProgram, ptx: *mut c_char);
    }
    optional {}
    unchecked {}
}

impl Cuda {
    /// The driver's own name for a code.
    pub(super) fn name(&self, code: c_int) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the driver writes one pointer, null or to text that lives as long as it does.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) } == 0 && !name.is_null();
        if !known {
            return "unknown error".into();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// A failure in words, for errors that have no place for a number.
    pub(super) fn describe(&self, failure: Failure) -> String {
        format!("{} failed: {} ({})", failure.call, self.name(failure.code), failure.code)
    }

    /// What a failed call means for `device`.
    pub(super) fn error(&self, failure: Failure, device: impl Display) -> Error {
        let device = device.to_string();
        if is_lost(failure.code) {
            return Error::Lost { device, cause: self.describe(failure) };
        }
        Error::Call {
            call: failure.call,
            device,
            name: self.name(failure.code),
            code: failure.code,
        }
    }
}

/// Codes after which the context, or its connection to the GPU, does not work any more.
fn is_lost(code: c_int) -> bool {
    use sys::CUresult::*;
    [
        CUDA_ERROR_DEINITIALIZED,
        CUDA_ERROR_ECC_UNCORRECTABLE,
        CUDA_ERROR_NVLINK_UNCORRECTABLE,
        CUDA_ERROR_CONTAINED,
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUDA_ERROR_ASSERT,
        CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_ILLEGAL_INSTRUCTION,
        CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUDA_ERROR_INVALID_PC,
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_TENSOR_MEMORY_LEAK,
        CUDA_ERROR_SYSTEM_NOT_READY,
        CUDA_ERROR_MPS_CONNECTION_FAILED,
        CUDA_ERROR_MPS_RPC_FAILURE,
        CUDA_ERROR_MPS_SERVER_NOT_READY,
        CUDA_ERROR_MPS_CLIENT_TERMINATED,
        CUDA_ERROR_EXTERNAL_DEVICE,
    ]
    .into_iter()
    .any(|lost| lost as c_int == code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_and_not_a_panic() {
        for loaded in [Cuda::load().map(drop), Nvrtc::load().map(drop)] {
            if let Err(error) = loaded {
                assert!(
                    matches!(error, Error::LibraryMissing { .. } | Error::SymbolMissing { .. }),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn sticky_codes_are_lost_and_others_are_not() {
        for code in [4, 214, 700, 702, 709, 714, 715, 716, 717, 718, 719, 802, 805, 911] {
            assert!(is_lost(code), "{code}");
        }
        for code in [0, 1, 2, 100, 201, 208, 400, 600, 704, 705, 801, 999, 123_456] {
            assert!(!is_lost(code), "{code}");
        }
    }
}
