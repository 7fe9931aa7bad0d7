//! Code objects, which are cubins, and launches of their kernels.

use std::ffi::{c_char, c_int, c_uint, c_void};

use hip_sys::*;

use super::device::bind;
use crate::call::Result;

super::forward! {
    fn hipModuleLoadData(place: *mut hipModule_t, image: *const c_void) = cuModuleLoadData;
    fn hipModuleUnload(module: hipModule_t) = cuModuleUnload;
    fn hipModuleGetFunction(place: *mut hipFunction_t, module: hipModule_t, name: *const c_char)
        = cuModuleGetFunction;
    fn hipFuncGetAttribute(
        place: *mut c_int, attribute: hipFunction_attribute, function: hipFunction_t
    ) = cuFuncGetAttribute;
    fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        place: *mut c_int, function: hipFunction_t, block_threads: c_int, shared_bytes: usize
    ) = cuOccupancyMaxActiveBlocksPerMultiprocessor;
}

#[expect(clippy::too_many_arguments, reason = "the arguments of the C function")]
pub(crate) unsafe fn hipModuleLaunchKernel(
    function: hipFunction_t,
    grid_dim_x: c_uint,
    grid_dim_y: c_uint,
    grid_dim_z: c_uint,
    block_dim_x: c_uint,
    block_dim_y: c_uint,
    block_dim_z: c_uint,
    shared_bytes: c_uint,
    stream: hipStream_t,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let cuda = bind()?;
    // SAFETY: the caller's contract.
    unsafe {
        cuda.cuLaunchKernel(
            function,
            grid_dim_x,
            grid_dim_y,
            grid_dim_z,
            block_dim_x,
            block_dim_y,
            block_dim_z,
            shared_bytes,
            stream,
            arguments,
            extra,
        )
    }
}
