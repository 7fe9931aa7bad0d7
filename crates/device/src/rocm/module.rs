//! The copy kernel, loaded on a device.

use std::ffi::{CString, c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use hip_sys as sys;

use super::RocmOptions;
use super::compile;
use super::context::Context;
use crate::device::{Capabilities, DeviceInfo};
use crate::error::{Error, Result};
use crate::kernel::{BLOCK_THREADS, CodeCache, Entry, NoKernel};

/// The kernels, loaded on one device.
#[derive(Debug)]
pub(super) struct Kernel {
    context: Arc<Context>,
    module: sys::hipModule_t,
    /// By [`Entry`].
    functions: [Function; Entry::ALL.len()],
}

#[derive(Clone, Copy, Debug)]
struct Function {
    raw: sys::hipFunction_t,
    /// Blocks of it that fit on one multiprocessor together.
    blocks: u32,
}

// SAFETY: a module and a function are names that HIP takes on any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; neither changes after it is loaded.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads the kernel, and says in `info` where it came from or why there is none.
    pub(super) fn open(
        context: &Arc<Context>,
        options: &RocmOptions,
        info: &mut DeviceInfo,
    ) -> Option<Self> {
        if !options.kernel {
            info.kernel = "none: turned off".into();
            return None;
        }
        let cache = CodeCache { directory: options.cache_directory.clone() };
        let directories = &options.library_directories;
        match Self::prepare(context, &info.architecture, directories, &cache) {
            Ok((kernel, origin)) => {
                info.kernel = origin;
                info.capabilities |= Capabilities::KERNEL;
                Some(kernel)
            }
            Err(none) => {
                tracing::warn!(device = %context, reason = %none.reason, log = %none.log, "no copy kernel: all copies are DMA");
                info.kernel = format!("none: {}", none.reason);
                None
            }
        }
    }

    /// Loads the kernel for a device of that architecture; also returns where it came from.
    fn prepare(
        context: &Arc<Context>,
        architecture: &str,
        directories: &[PathBuf],
        cache: &CodeCache,
    ) -> Result<(Self, String), NoKernel> {
        let load = |code: &[u8]| Self::load(context, code);
        compile::prepare(context.hip, architecture, directories, cache, load)
    }

    fn load(context: &Arc<Context>, code: &[u8]) -> Result<Self> {
        let _scope = context.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is whole, as hipRTC made it; `CodeCache` gives back nothing but what was
        // stored. HIP copies it.
        unsafe { context.hip.hipModuleLoadData(&mut module, code.as_ptr().cast::<c_void>()) }
            .map_err(|failure| context.error(failure))?;
        // From here on `Drop` unloads the module.
        let none = Function { raw: std::ptr::null_mut(), blocks: 0 };
        let mut kernel =
            Self { context: Arc::clone(context), module, functions: [none; Entry::ALL.len()] };
        for entry in Entry::ALL {
            kernel.functions[entry as usize] = kernel.find(entry)?;
        }
        Ok(kernel)
    }

    fn find(&self, entry: Entry) -> Result<Function> {
        let context = &self.context;
        let hip = context.hip;
        let mut raw = std::ptr::null_mut();
        let name = CString::new(entry.name()).expect("an entry's name is an identifier");
        // SAFETY: the module is loaded; the name ends with a zero.
        unsafe { hip.hipModuleGetFunction(&mut raw, self.module, name.as_ptr()) }
            .map_err(|failure| context.error(failure))?;
        let (mut threads, mut blocks) = (0, 0);
        let attribute = sys::HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        // SAFETY: the function was just found; HIP writes one number.
        unsafe { hip.hipFuncGetAttribute(&mut threads, attribute, raw) }
            .map_err(|failure| context.error(failure))?;
        if !u32::try_from(threads).is_ok_and(|threads| threads >= BLOCK_THREADS) {
            return Err(Error::Call {
                call: "hipFuncGetAttribute",
                device: context.to_string(),
                name: format!("only {threads} threads of {} fit in a block", entry.name()),
                code: threads,
            });
        }
        let block_threads = BLOCK_THREADS as c_int;
        // SAFETY: as above.
        unsafe {
            hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                raw,
                block_threads,
                0,
            )
        }
        .map_err(|failure| context.error(failure))?;
        Ok(Function { raw, blocks: u32::try_from(blocks).unwrap_or(0).max(1) })
    }

    pub(super) fn function(&self, entry: Entry) -> sys::hipFunction_t {
        self.functions[entry as usize].raw
    }

    /// Blocks of a kernel that fit on one multiprocessor together, at least 1.
    pub(super) fn blocks_per_multiprocessor(&self, entry: Entry) -> u32 {
        self.functions[entry as usize].blocks
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let unloaded = self.context.enter().and_then(|_scope| {
            // SAFETY: loaded by `load`, unloaded once; the driver that launches the function owns
            // this kernel, and its queues have ended.
            unsafe { self.context.hip.hipModuleUnload(self.module) }
                .map_err(|failure| self.context.error(failure))
        });
        if let Err(error) = unloaded {
            tracing::debug!(%error, "the copy kernel was not unloaded");
        }
    }
}
