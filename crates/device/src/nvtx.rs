//! Ranges on the time line of NVIDIA's tools, Nsight Systems among them, by NVTX: named stretches of
//! time beside what the GPU does.
//!
//! NVTX is a header that every program compiles into itself, and NVIDIA ships what that makes as a
//! library for other languages: libnvtx3interop (CUDA 12.9 and later), libnvToolsExt before. It does
//! nothing unless a tool runs the process.

use std::ffi::{CStr, OsStr, c_char};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use libloading::os::unix::{Library, Symbol};

use crate::error::{Error, Result};

const NAMES: [&str; 2] = ["libnvtx3interop.so.1", "libnvToolsExt.so.1"];

/// The library, opened.
pub struct Nvtx {
    start: Symbol<unsafe extern "C" fn(*const c_char) -> u64>,
    end: Symbol<unsafe extern "C" fn(u64)>,
    _library: Library,
}

impl Nvtx {
    /// Opens the library at a path, or the one that the loader finds.
    ///
    /// # Errors
    /// [`Error::LibraryMissing`], [`Error::SymbolMissing`].
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>> {
        let missing = |reason| Error::LibraryMissing { library: NAMES[0], reason };
        let library = match path {
            Some(path) => open(path.as_os_str()).map_err(missing)?,
            None => {
                let [new, old] = NAMES.map(OsStr::new);
                open(new).or_else(|reason| open(old).map_err(|_| reason)).map_err(missing)?
            }
        };
        let lacks = |symbol| move |_| Error::SymbolMissing { library: NAMES[0], symbol };
        // SAFETY: the two functions have these types in every version of nvToolsExt.h.
        let (start, end) =
            unsafe { (library.get(b"nvtxRangeStartA"), library.get(b"nvtxRangeEnd")) };
        let (start, end) =
            (start.map_err(lacks("nvtxRangeStartA"))?, end.map_err(lacks("nvtxRangeEnd"))?);
        Ok(Arc::new(Self { start, end, _library: library }))
    }

    /// A range that lasts until it is dropped, on whichever thread.
    pub fn range(self: &Arc<Self>, name: &CStr) -> NvtxRange {
        // SAFETY: a string that ends with a zero, which the function copies.
        let id = unsafe { (self.start)(name.as_ptr()) };
        NvtxRange { nvtx: Arc::clone(self), id }
    }
}

fn open(name: &OsStr) -> Result<Library, String> {
    use std::error::Error as _;
    // SAFETY: opening it runs its constructors, which is what a user of NVTX asks for.
    let opened = unsafe { Library::new(name) };
    // The loader's own words are the source.
    opened.map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

impl fmt::Debug for Nvtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvtx").finish_non_exhaustive()
    }
}

/// A range that is open.
#[derive(Debug)]
pub struct NvtxRange {
    nvtx: Arc<Nvtx>,
    id: u64,
}

impl Drop for NvtxRange {
    fn drop(&mut self) {
        // SAFETY: the number is of a range that this library began and that has not ended.
        unsafe { (self.nvtx.end)(self.id) }
    }
}
