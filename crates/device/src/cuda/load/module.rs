//! The compiled loads, and the device memory that they work on.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::report;
use crate::cuda::compile::{Compiler, no_compiler, targets};
use crate::cuda::context::Context;
use crate::error::{Error, Result};
use crate::kernel::NoKernel;
use crate::load::LoadError;

/// The source, loaded into a device's context.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
    pub(super) fill: Function,
    pub(super) gemm: Function,
    pub(super) blocks: Function,
    pub(super) memory: Function,
    pub(super) weights: Function,
}

/// A kernel; null where the architecture has none of that name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function(pub(super) sys::CUfunction);

// SAFETY: a module and a function are names that the driver takes on any thread.
unsafe impl Send for Module {}
// SAFETY: as above; neither changes after it is loaded.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn compile(
        context: &Arc<Context>,
        capability: u32,
        source: &str,
    ) -> Result<Self, LoadError> {
        let not_compiled = |NoKernel { reason, log }| LoadError::NotCompiled {
            device: context.to_string(),
            reason,
            log,
        };
        let none = |reason| not_compiled(NoKernel { reason, log: String::new() });
        let compiler = Compiler::load().map_err(|error| none(no_compiler(error)))?;
        let mut refused = None;
        for target in targets(&compiler.architectures, capability) {
            let code =
                compiler.compile_source(source, c"load.cu", &target).map_err(not_compiled)?;
            match Self::load(context, &code) {
                Ok(module) => return Ok(module),
                Err(error) => refused = Some(format!("code for {target} does not load: {error}")),
            }
        }
        Err(none(refused.unwrap_or_else(|| format!("NVRTC does not know sm_{capability}"))))
    }

    fn load(context: &Arc<Context>, code: &[u8]) -> Result<Self> {
        let cuda = context.cuda;
        let _scope = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the code is whole, as NVRTC made it: a cubin, or PTX with the zero at its end.
        // The driver copies it.
        unsafe { cuda.cuModuleLoadData(&mut raw, code.as_ptr().cast::<c_void>()) }
            .map_err(|failure| context.error(failure))?;
        let none = Function(std::ptr::null_mut());
        // From here on `Drop` unloads the module.
        let mut module = Self {
            context: Arc::clone(context),
            raw,
            fill: none,
            gemm: none,
            blocks: none,
            memory: none,
            weights: none,
        };
        module.fill = module.function("kvferry_load_fill")?;
        module.blocks = module.function("kvferry_load_blocks")?;
        module.memory = module.function("kvferry_load_memory")?;
        module.weights = module.function("kvferry_load_weights")?;
        // Older GPUs have no such kernel; `CudaLoads::gemm` refuses them before it is launched.
        module.gemm = module.function("kvferry_load_gemm").unwrap_or(none);
        Ok(module)
    }

    fn function(&self, name: &str) -> Result<Function> {
        let name = CString::new(name).expect("a kernel's name is an identifier");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name ends with a zero.
        unsafe { self.context.cuda.cuModuleGetFunction(&mut function, self.raw, name.as_ptr()) }
            .map_err(|failure| self.context.error(failure))?;
        Ok(Function(function))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let unloaded = self.context.enter().and_then(|_scope| {
            // SAFETY: loaded by `load`, unloaded once; every `Running` holds the module until its
            // stream is idle.
            unsafe { self.context.cuda.cuModuleUnload(self.raw) }
                .map_err(|failure| self.context.error(failure))
        });
        report(unloaded);
    }
}

/// Device memory, freed on drop.
#[derive(Debug)]
pub(super) struct Buffer {
    context: Arc<Context>,
    pub(super) addr: sys::CUdeviceptr,
}

impl Buffer {
    pub(super) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let _scope = context.enter()?;
        let mut addr = 0;
        // SAFETY: the context is current; the driver writes one address.
        unsafe { context.cuda.cuMemAlloc_v2(&mut addr, bytes as usize) }.map_err(|failure| {
            if failure.is(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
                return Error::OutOfMemory { device: context.to_string(), kind: "device", bytes };
            }
            context.error(failure)
        })?;
        Ok(Self { context: Arc::clone(context), addr })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let freed = self.context.enter().and_then(|_scope| {
            // SAFETY: allocated by `new`, freed once; `Running` drops its buffers after its stream
            // is idle.
            unsafe { self.context.cuda.cuMemFree_v2(self.addr) }
                .map_err(|failure| self.context.error(failure))
        });
        report(freed);
    }
}
