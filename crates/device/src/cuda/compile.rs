//! The copy kernel: found in the cache or compiled by NVRTC, then loaded, so that no transfer
//! waits for a compiler.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc_sys;

use super::CudaOptions;
use super::context::Context;
use super::library::{Failure, Nvrtc};
use crate::device::{Capabilities, DeviceInfo};
use crate::error::{Error, Result};
use crate::kernel::{self, CodeCache, Entry, NoKernel};

/// The kernels, loaded into a device's context.
#[derive(Debug)]
pub(super) struct Kernel {
    context: Arc<Context>,
    module: sys::CUmodule,
    /// By [`Entry`].
    functions: [Function; Entry::ALL.len()],
}

#[derive(Clone, Copy, Debug)]
struct Function {
    raw: sys::CUfunction,
    /// Blocks of it that fit on one multiprocessor together.
    blocks: u32,
}

// SAFETY: a module and a function are names that the driver takes on any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; neither changes after it is loaded.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads the kernel, and says in `info` where it came from or why there is none.
    pub(super) fn open(
        context: &Arc<Context>,
        capability: u32,
        options: &CudaOptions,
        info: &mut DeviceInfo,
    ) -> Option<Self> {
        if !options.kernel {
            info.kernel = "none: turned off".into();
            return None;
        }
        let cache = CodeCache { directory: options.cache_directory.clone() };
        match Self::prepare(context, capability, &cache) {
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

    /// Loads the kernel for a device of compute capability `capability` (90 is 9.0); also returns
    /// where it came from.
    fn prepare(
        context: &Arc<Context>,
        capability: u32,
        cache: &CodeCache,
    ) -> Result<(Self, String), NoKernel> {
        let architecture = format!("sm_{capability}");
        let compiler = Compiler::load();
        // Without a compiler the code of any version of it will do.
        let kind = compiler.as_ref().map_or_else(|_| ANY_VERSION.into(), Compiler::kind);
        if let Some(code) = cache.load(&architecture, &kind) {
            match Self::load(context, &code) {
                Ok(kernel) => return Ok((kernel, cache.origin())),
                Err(error) => {
                    tracing::debug!(%error, %architecture, kind, "cached kernel does not load")
                }
            }
        }
        let compiler = compiler
            .map_err(|error| NoKernel { reason: no_compiler(error), log: String::new() })?;
        let version = compiler.version();
        let mut refused = Vec::new();
        for target in targets(&compiler.architectures, capability) {
            let code = compiler.compile(&target)?;
            match Self::load(context, &code) {
                Ok(kernel) => {
                    cache.store(&architecture, &kind, &code);
                    cache.store(&architecture, ANY_VERSION, &code);
                    return Ok((kernel, format!("compiled for {target} by NVRTC {version}")));
                }
                Err(error) => refused.push(format!("code for {target} does not load: {error}")),
            }
        }
        let reason = if refused.is_empty() {
            format!("it does not know {architecture}")
        } else {
            refused.join("; ")
        };
        Err(NoKernel { reason: format!("NVRTC {version}: {reason}"), log: String::new() })
    }

    fn load(context: &Arc<Context>, code: &[u8]) -> Result<Self> {
        let cuda = context.cuda;
        let _scope = context.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is whole, as NVRTC made it: a cubin, or PTX with the zero at its end.
        // `CodeCache` gives back nothing but what was stored. The driver copies it.
        unsafe { cuda.cuModuleLoadData(&mut module, code.as_ptr().cast::<c_void>()) }
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
        let cuda = context.cuda;
        let mut raw = std::ptr::null_mut();
        let name = CString::new(entry.name()).expect("an entry's name is an identifier");
        // SAFETY: the module is loaded; the name ends with a zero.
        unsafe { cuda.cuModuleGetFunction(&mut raw, self.module, name.as_ptr()) }
            .map_err(|failure| context.error(failure))?;
        let (mut threads, mut blocks) = (0, 0);
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        // SAFETY: the function was just found; the driver writes one number. With lazy loading
        // this is what brings the code to the device.
        unsafe { cuda.cuFuncGetAttribute(&mut threads, attribute, raw) }
            .map_err(|failure| context.error(failure))?;
        if !u32::try_from(threads).is_ok_and(|threads| threads >= kernel::BLOCK_THREADS) {
            return Err(Error::Call {
                call: "cuFuncGetAttribute",
                device: context.to_string(),
                name: format!("only {threads} threads of {} fit in a block", entry.name()),
                code: threads,
            });
        }
        let block_threads = kernel::BLOCK_THREADS as c_int;
        // SAFETY: as above.
        unsafe {
            cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, raw, block_threads, 0)
        }
        .map_err(|failure| context.error(failure))?;
        Ok(Function { raw, blocks: u32::try_from(blocks).unwrap_or(0).max(1) })
    }

    pub(super) fn function(&self, entry: Entry) -> sys::CUfunction {
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
            unsafe { self.context.cuda.cuModuleUnload(self.module) }
                .map_err(|failure| self.context.error(failure))
        });
        if let Err(error) = unloaded {
            tracing::debug!(%error, "the copy kernel was not unloaded");
        }
    }
}

/// Kind of cached code that came from some version of NVRTC.
const ANY_VERSION: &str = "nvrtc";

pub(super) fn no_compiler(error: Error) -> String {
    match error {
        Error::LibraryMissing { library, reason } => format!(
            "cannot load {library}: {reason}; install NVRTC (of the CUDA toolkit, or the Python package \
             nvidia-cuda-nvrtc) or add its folder to LD_LIBRARY_PATH"
        ),
        error => error.to_string(),
    }
}

/// What to compile for, best first: the device's own code, then PTX of the newest architecture
/// that both know.
pub(super) fn targets(supported: &[u32], capability: u32) -> Vec<String> {
    let own = supported.contains(&capability).then(|| format!("sm_{capability}"));
    let newest = supported.iter().filter(|&&architecture| architecture <= capability).max();
    own.into_iter().chain(newest.map(|architecture| format!("compute_{architecture}"))).collect()
}

/// NVRTC and what it can do.
#[derive(Debug)]
pub(super) struct Compiler {
    nvrtc: &'static Nvrtc,
    major: c_int,
    minor: c_int,
    pub(super) architectures: Vec<u32>,
}

impl Compiler {
    pub(super) fn load() -> Result<Self> {
        let nvrtc = Nvrtc::load()?;
        let error = |failure: Failure| Error::Call {
            call: failure.call,
            device: Nvrtc::LIBRARY.into(),
            name: name(failure.code).into(),
            code: failure.code,
        };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: NVRTC writes two numbers.
        unsafe { nvrtc.nvrtcVersion(&mut major, &mut minor) }.map_err(error)?;
        // SAFETY: NVRTC writes one number.
        unsafe { nvrtc.nvrtcGetNumSupportedArchs(&mut count) }.map_err(error)?;
        let mut architectures = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: NVRTC writes as many numbers as it just said.
        unsafe { nvrtc.nvrtcGetSupportedArchs(architectures.as_mut_ptr()) }.map_err(error)?;
        let architectures = architectures
            .into_iter()
            .filter_map(|architecture| u32::try_from(architecture).ok())
            .collect();
        Ok(Self { nvrtc, major, minor, architectures })
    }

    pub(super) fn version(&self) -> String {
        format!("{}.{}", self.major, self.minor)
    }

    /// What it compiles for.
    pub(super) fn architectures(&self) -> Vec<String> {
        self.architectures.iter().map(|architecture| format!("sm_{architecture}")).collect()
    }

    fn kind(&self) -> String {
        format!("nvrtc-{}", self.version())
    }

    /// Compiles the kernel: a cubin for a target `sm_`, PTX for a target `compute_`.
    fn compile(&self, target: &str) -> Result<Vec<u8>, NoKernel> {
        self.compile_source(kernel::SOURCE, c"copy.cu", target)
    }

    /// As [`Self::compile`], for any source; `file` is what the compiler calls it in its log.
    pub(super) fn compile_source(
        &self,
        source: &str,
        file: &CStr,
        target: &str,
    ) -> Result<Vec<u8>, NoKernel> {
        let nvrtc = self.nvrtc;
        let fail = |failure: Failure, log| NoKernel {
            reason: format!(
                "{} failed for {target}: {} ({}), NVRTC {}",
                failure.call,
                name(failure.code),
                failure.code,
                self.version()
            ),
            log,
        };
        let source = CString::new(source).expect("the source is text without zeros");
        let mut program = Program { nvrtc, raw: std::ptr::null_mut() };
        // SAFETY: both texts end with a zero and NVRTC copies them; there are no headers.
        unsafe {
            nvrtc.nvrtcCreateProgram(
                &mut program.raw,
                source.as_ptr(),
                file.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        }
        .map_err(|failure| fail(failure, String::new()))?;
        let architecture =
            CString::new(format!("--gpu-architecture={target}")).expect("no zero in a target");
        let options = [architecture.as_ptr(), c"--std=c++17".as_ptr()];
        // SAFETY: the program exists, the options outlive the call.
        unsafe { nvrtc.nvrtcCompileProgram(program.raw, options.len() as c_int, options.as_ptr()) }
            .map_err(|failure| fail(failure, program.log()))?;
        let code = if target.starts_with("sm_") {
            program.output(Nvrtc::nvrtcGetCUBINSize, Nvrtc::nvrtcGetCUBIN)
        } else {
            program.output(Nvrtc::nvrtcGetPTXSize, Nvrtc::nvrtcGetPTX)
        };
        code.map_err(|failure| fail(failure, program.log()))
    }
}

/// A program that NVRTC holds until drop.
struct Program {
    nvrtc: &'static Nvrtc,
    raw: nvrtc_sys::nvrtcProgram,
}

impl Program {
    fn output(
        &self,
        size: unsafe fn(&Nvrtc, nvrtc_sys::nvrtcProgram, *mut usize) -> Result<(), Failure>,
        bytes: unsafe fn(&Nvrtc, nvrtc_sys::nvrtcProgram, *mut c_char) -> Result<(), Failure>,
    ) -> Result<Vec<u8>, Failure> {
        let mut len = 0;
        // SAFETY: the program exists; NVRTC writes one number.
        unsafe { size(self.nvrtc, self.raw, &mut len) }?;
        let mut output = vec![0; len];
        // SAFETY: NVRTC writes as many bytes as it just said.
        unsafe { bytes(self.nvrtc, self.raw, output.as_mut_ptr().cast()) }?;
        Ok(output)
    }

    fn log(&self) -> String {
        let log = self
            .output(Nvrtc::nvrtcGetProgramLogSize, Nvrtc::nvrtcGetProgramLog)
            .unwrap_or_default();
        let text = CStr::from_bytes_until_nul(&log).map_or(&log[..], CStr::to_bytes);
        String::from_utf8_lossy(text).trim().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { self.nvrtc.nvrtcDestroyProgram(&mut self.raw) };
        }
    }
}

/// NVRTC's names; its own function for them gives the same.
fn name(code: c_int) -> &'static str {
    match code {
        1 => "NVRTC_ERROR_OUT_OF_MEMORY",
        2 => "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        3 => "NVRTC_ERROR_INVALID_INPUT",
        4 => "NVRTC_ERROR_INVALID_PROGRAM",
        5 => "NVRTC_ERROR_INVALID_OPTION",
        6 => "NVRTC_ERROR_COMPILATION",
        7 => "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        11 => "NVRTC_ERROR_INTERNAL_ERROR",
        _ => "NVRTC error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_code_comes_before_ptx_of_the_newest_common_architecture() {
        assert_eq!(targets(&[75, 80, 90, 100], 90), ["sm_90", "compute_90"]);
        assert_eq!(targets(&[75, 80, 90, 100], 103), ["compute_100"]);
        assert_eq!(targets(&[75, 80], 70), Vec::<String>::new());
    }

    #[test]
    fn the_kernel_compiles_for_every_architecture_that_nvrtc_knows() {
        let compiler = match Compiler::load() {
            Ok(compiler) => compiler,
            Err(error) => {
                crate::conformance::skip("nvrtc", &error);
                return;
            }
        };
        for &architecture in
            compiler.architectures.iter().filter(|&&architecture| architecture >= 70)
        {
            for target in targets(&compiler.architectures, architecture) {
                let code = compiler
                    .compile(&target)
                    .unwrap_or_else(|error| panic!("{target}: {}\n{}", error.reason, error.log));
                let cubin = target.starts_with("sm_");
                assert_eq!(code.starts_with(b"\x7fELF"), cubin, "{target}");
                assert!(
                    cubin || code.ends_with(b"\0"),
                    "{target}: the driver looks for the end of PTX"
                );
            }
        }
        let error = compiler.compile("sm_1").expect_err("no such architecture");
        assert!(error.reason.contains("NVRTC_ERROR_INVALID_OPTION (5)"), "{error:?}");
    }
}
