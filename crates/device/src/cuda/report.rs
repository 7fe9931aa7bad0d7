//! What NVIDIA's libraries on this machine are, for people who ask why something does not work.

use super::compile::Compiler;
use super::library::Cuda;
use crate::error::Result;

/// The libraries that this process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryReport {
    /// The newest CUDA that the driver knows, as in `13.0`, or why there is no driver.
    pub driver: Result<String>,
    /// The run-time compiler, or why there is none: then every copy is DMA, unless the cache has the
    /// kernel.
    pub compiler: Result<CompilerReport>,
}

/// NVRTC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompilerReport {
    /// As in `12.9`.
    pub version: String,
    /// What it compiles for, as in `sm_90`.
    pub architectures: Vec<String>,
}

/// Loads libcuda and NVRTC, and says what they are. Needs no GPU.
pub fn describe() -> LibraryReport {
    let driver = Cuda::load().and_then(|cuda| {
        let mut version = 0;
        // SAFETY: the driver writes one number.
        let asked = unsafe { cuda.cuDriverGetVersion(&mut version) };
        asked.map_err(|failure| cuda.error(failure, Cuda::LIBRARY))?;
        Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
    });
    let compiler = Compiler::load().map(|compiler| CompilerReport {
        version: compiler.version(),
        architectures: compiler.architectures(),
    });
    LibraryReport { driver, compiler }
}
