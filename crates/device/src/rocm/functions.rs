//! The functions of libamdhip64, libhiprtc and libamd_comgr as methods that give a code back as a
//! [`Failure`].
//!
//! A library without a function that every device needs is refused when it is loaded. One without
//! an optional function fails each call of it, with [`NO_SYMBOL`].

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::path::PathBuf;

use hip_sys as sys;
use hip_sys::{comgr, hiprtc};
use libloading::os::unix::Library;

use super::library::{Comgr, Hip, Hiprtc};
use super::search::{file_of, said};
use crate::error::{Error, Result};

/// A call that did not return success. All three libraries count success as 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) call: &'static str,
    pub(super) code: c_uint,
}

impl Failure {
    pub(super) fn is(self, code: c_uint) -> bool {
        self.code == code
    }
}

/// HIP's own word for a symbol that a library does not have.
pub(super) const NO_SYMBOL: c_uint = sys::hipErrorSharedObjectSymbolNotFound;

/// A method for each function, and how a library is asked for them.
macro_rules! functions {
    (
        $table:ident calls $library:ty;
        { $($symbol:ident($($arg:ident: $type:ty),*);)* }
        optional { $($optional:ident($($optional_arg:ident: $optional_type:ty),*);)* }
    ) => {
        #[allow(non_snake_case, reason = "the names of the C functions; not all are written so")]
        #[allow(clippy::too_many_arguments, reason = "the arguments of the C functions; not all tables have so many")]
        #[allow(dead_code, reason = "some are called by tests only")]
        impl $table {
            $(
                /// # Safety
                /// As AMD documents for the function.
                pub(super) unsafe fn $symbol(&self, $($arg: $type),*) -> Result<(), Failure> {
                    // SAFETY: the caller's contract.
                    let code = self.functions.$symbol.as_ref().map_or(NO_SYMBOL, |call| unsafe { call($($arg),*) });
                    if code == 0 { Ok(()) } else { Err(Failure { call: stringify!($symbol), code }) }
                }
            )*
            $(
                /// Fails with [`NO_SYMBOL`] where the library does not have it.
                ///
                /// # Safety
                /// As AMD documents for the function.
                pub(super) unsafe fn $optional(&self, $($optional_arg: $optional_type),*) -> Result<(), Failure> {
                    // SAFETY: the caller's contract.
                    let code = self.functions.$optional.as_ref().map_or(NO_SYMBOL, |call| unsafe { call($($optional_arg),*) });
                    if code == 0 { Ok(()) } else { Err(Failure { call: stringify!($optional), code }) }
                }
            )*
        }

        #[allow(dead_code, reason = "of some tables only a part is asked")]
        impl $table {
            /// The functions of a library that was opened as `name`, and the file that they are in.
            pub(super) fn fill(library: Library, name: PathBuf) -> Result<($library, PathBuf)> {
                // SAFETY: the signatures are those of AMD's headers.
                let functions = unsafe { <$library>::from_library(library) }.map_err(|error| {
                    Error::LibraryMissing { library: Self::LIBRARY, reason: said(&error) }
                })?;
                let required = [$((
                    stringify!($symbol),
                    functions.$symbol.as_ref().ok().map(|call| *call as usize),
                ),)*];
                if let Some(&(symbol, _)) = required.iter().find(|(_, address)| address.is_none()) {
                    // Closing a library of AMD's is nothing that anybody tests.
                    std::mem::forget(functions);
                    return Err(Error::SymbolMissing { library: Self::LIBRARY, symbol });
                }
                let path = required[0].1.and_then(file_of).unwrap_or(name);
                Ok((functions, path))
            }

            /// The functions that every device needs.
            #[cfg(test)]
            #[allow(dead_code, reason = "no test stands in for all tables")]
            pub(super) const REQUIRED: &[&str] = &[$(stringify!($symbol)),*];

            /// Every function of these, and whether the library has it.
            pub(super) fn symbols(&self) -> Vec<(&'static str, bool)> {
                vec![
                    $((stringify!($symbol), self.functions.$symbol.is_ok()),)*
                    $((stringify!($optional), self.functions.$optional.is_ok()),)*
                ]
            }
        }
    };
}

functions! {
    Hip calls sys::HipLibrary; {
        hipInit(flags: c_uint);
        hipRuntimeGetVersion(version: *mut c_int);
        hipGetLastError();
        hipPeekAtLastError();
        hipGetDeviceCount(count: *mut c_int);
        hipDeviceGet(device: *mut sys::hipDevice_t, ordinal: c_int);
        hipDeviceGetName(name: *mut c_char, len: c_int, device: sys::hipDevice_t);
        hipDeviceGetUuid(uuid: *mut sys::hipUUID, device: sys::hipDevice_t);
        hipDeviceGetPCIBusId(text: *mut c_char, len: c_int, ordinal: c_int);
        hipDeviceTotalMem(bytes: *mut usize, device: sys::hipDevice_t);
        hipDeviceGetAttribute(value: *mut c_int, attribute: sys::hipDeviceAttribute_t, ordinal: c_int);
        hipDeviceCanAccessPeer(can: *mut c_int, ordinal: c_int, peer: c_int);
        hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint);
        hipSetDevice(ordinal: c_int);
        hipGetDevice(ordinal: *mut c_int);
        hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
        hipThreadExchangeStreamCaptureMode(mode: *mut sys::hipStreamCaptureMode);
        hipMalloc(addr: *mut *mut c_void, bytes: usize);
        hipFree(addr: *mut c_void);
        hipHostMalloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
        hipHostFree(host: *mut c_void);
        hipHostRegister(host: *mut c_void, bytes: usize, flags: c_uint);
        hipHostUnregister(host: *mut c_void);
        hipHostGetDevicePointer(addr: *mut *mut c_void, host: *mut c_void, flags: c_uint);
        hipPointerGetAttributes(attributes: *mut sys::hipPointerAttribute_t, addr: *const c_void);
        hipPointerGetAttribute(value: *mut c_void, attribute: sys::hipPointer_attribute, addr: sys::hipDeviceptr_t);
        hipMemGetAddressRange(base: *mut sys::hipDeviceptr_t, bytes: *mut usize, addr: sys::hipDeviceptr_t);
        hipIpcGetMemHandle(handle: *mut sys::hipIpcMemHandle_t, addr: *mut c_void);
        hipIpcOpenMemHandle(addr: *mut *mut c_void, handle: sys::hipIpcMemHandle_t, flags: c_uint);
        hipIpcCloseMemHandle(addr: *mut c_void);
        hipStreamCreateWithPriority(stream: *mut sys::hipStream_t, flags: c_uint, priority: c_int);
        hipStreamDestroy(stream: sys::hipStream_t);
        hipStreamSynchronize(stream: sys::hipStream_t);
        hipStreamWaitEvent(stream: sys::hipStream_t, event: sys::hipEvent_t, flags: c_uint);
        hipStreamWriteValue32(stream: sys::hipStream_t, addr: *mut c_void, value: u32, flags: c_uint);
        hipStreamIsCapturing(stream: sys::hipStream_t, status: *mut sys::hipStreamCaptureStatus);
        hipEventCreateWithFlags(event: *mut sys::hipEvent_t, flags: c_uint);
        hipEventDestroy(event: sys::hipEvent_t);
        hipEventRecord(event: sys::hipEvent_t, stream: sys::hipStream_t);
        hipEventQuery(event: sys::hipEvent_t);
        hipMemcpyAsync(dst: *mut c_void, src: *const c_void, bytes: usize, kind: sys::hipMemcpyKind, stream: sys::hipStream_t);
        hipMemcpy2DAsync(
            dst: *mut c_void, dst_pitch: usize,
            src: *const c_void, src_pitch: usize,
            width: usize, height: usize,
            kind: sys::hipMemcpyKind,
            stream: sys::hipStream_t
        );
        hipMemsetD8Async(addr: sys::hipDeviceptr_t, value: c_uchar, count: usize, stream: sys::hipStream_t);
        hipModuleLoadData(module: *mut sys::hipModule_t, image: *const c_void);
        hipModuleUnload(module: sys::hipModule_t);
        hipModuleGetFunction(function: *mut sys::hipFunction_t, module: sys::hipModule_t, name: *const c_char);
        hipFuncGetAttribute(value: *mut c_int, attribute: sys::hipFunction_attribute, function: sys::hipFunction_t);
        hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int,
            function: sys::hipFunction_t,
            block_threads: c_int,
            shared_bytes: usize
        );
        hipModuleLaunchKernel(
            function: sys::hipFunction_t,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint,
            stream: sys::hipStream_t,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void
        );
    }
    optional {
        hipGetDevicePropertiesR0600(properties: *mut sys::hipDeviceProp_tR0600, ordinal: c_int);
        hipGetDeviceProperties(properties: *mut c_void, ordinal: c_int);
        hipStreamWaitValue32(stream: sys::hipStream_t, addr: *mut c_void, value: u32, flags: c_uint, mask: u32);
        hipStreamBeginCapture(stream: sys::hipStream_t, mode: sys::hipStreamCaptureMode);
        hipStreamEndCapture(stream: sys::hipStream_t, graph: *mut sys::hipGraph_t);
        hipGraphDestroy(graph: sys::hipGraph_t);
        hipMemCreate(
            handle: *mut sys::hipMemGenericAllocationHandle_t,
            bytes: usize,
            properties: *const sys::hipMemAllocationProp,
            flags: c_ulonglong
        );
        hipMemRelease(handle: sys::hipMemGenericAllocationHandle_t);
        hipMemRetainAllocationHandle(handle: *mut sys::hipMemGenericAllocationHandle_t, addr: *mut c_void);
        hipMemGetAllocationPropertiesFromHandle(
            properties: *mut sys::hipMemAllocationProp,
            handle: sys::hipMemGenericAllocationHandle_t
        );
        hipMemGetAllocationGranularity(
            bytes: *mut usize,
            properties: *const sys::hipMemAllocationProp,
            option: sys::hipMemAllocationGranularity_flags
        );
        hipMemExportToShareableHandle(
            shared: *mut c_void,
            handle: sys::hipMemGenericAllocationHandle_t,
            kind: sys::hipMemAllocationHandleType,
            flags: c_ulonglong
        );
        hipMemImportFromShareableHandle(
            handle: *mut sys::hipMemGenericAllocationHandle_t,
            shared: *mut c_void,
            kind: sys::hipMemAllocationHandleType
        );
        hipMemAddressReserve(
            addr: *mut *mut c_void,
            bytes: usize,
            alignment: usize,
            wanted: *mut c_void,
            flags: c_ulonglong
        );
        hipMemAddressFree(addr: *mut c_void, bytes: usize);
        hipMemMap(
            addr: *mut c_void,
            bytes: usize,
            offset: usize,
            handle: sys::hipMemGenericAllocationHandle_t,
            flags: c_ulonglong
        );
        hipMemUnmap(addr: *mut c_void, bytes: usize);
        hipMemSetAccess(addr: *mut c_void, bytes: usize, access: *const sys::hipMemAccessDesc, count: usize);
        hipMemGetAccess(rights: *mut c_ulonglong, location: *const sys::hipMemLocation, addr: *mut c_void);
    }
}

functions! {
    Hiprtc calls hiprtc::HiprtcLibrary; {
        hiprtcCreateProgram(
            program: *mut hiprtc::hiprtcProgram,
            source: *const c_char,
            name: *const c_char,
            header_count: c_int,
            headers: *const *const c_char,
            header_names: *const *const c_char
        );
        hiprtcDestroyProgram(program: *mut hiprtc::hiprtcProgram);
        hiprtcCompileProgram(program: hiprtc::hiprtcProgram, option_count: c_int, options: *const *const c_char);
        hiprtcGetProgramLogSize(program: hiprtc::hiprtcProgram, bytes: *mut usize);
        hiprtcGetProgramLog(program: hiprtc::hiprtcProgram, log: *mut c_char);
        hiprtcGetCodeSize(program: hiprtc::hiprtcProgram, bytes: *mut usize);
        hiprtcGetCode(program: hiprtc::hiprtcProgram, code: *mut c_char);
    }
    optional {}
}

functions! {
    Comgr calls comgr::ComgrLibrary; {
        amd_comgr_get_isa_count(count: *mut usize);
        amd_comgr_get_isa_name(index: usize, name: *mut *const c_char);
        amd_comgr_get_isa_metadata(name: *const c_char, metadata: *mut comgr::amd_comgr_metadata_node_t);
        amd_comgr_destroy_metadata(metadata: comgr::amd_comgr_metadata_node_t);
    }
    optional {}
}

impl Hip {
    /// HIP's own name for a code.
    pub(super) fn name(&self, code: c_uint) -> String {
        let Ok(name_of) = &self.functions.hipGetErrorName else { return "unknown error".into() };
        // SAFETY: any code may be asked for.
        text(unsafe { name_of(code) })
    }
}

impl Hiprtc {
    /// hipRTC's own name for a code.
    pub(super) fn name(&self, code: c_uint) -> String {
        let Ok(name_of) = &self.functions.hiprtcGetErrorString else {
            return "unknown error".into();
        };
        // SAFETY: any code may be asked for.
        text(unsafe { name_of(code) })
    }
}

/// A text of a library's, which lives as long as it does.
fn text(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown error".into();
    }
    // SAFETY: not null, and the libraries end their texts with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
