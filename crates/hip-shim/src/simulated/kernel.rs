//! Code objects, and launches of their kernels.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use hip_sys::*;
use libloading::Library;
use rustix::io::write;

use super::capture;
use super::compile::TARGET;
use super::device::{check_device, current_device};
use super::memory::new_file;
use super::stream::{Work, submit};
use crate::call::{Result, put};
use crate::settings::settings;

/// Threads of a block at most.
const MAX_THREADS: u32 = 1024;
/// Blocks that fit on one multiprocessor together.
const BLOCKS: c_int = 2;

#[derive(Debug)]
struct Module {
    library: Library,
    /// The loader knows a library by its path, which is this descriptor's number.
    _file: OwnedFd,
}

#[derive(Debug)]
struct Function {
    module: Arc<Module>,
    pack: unsafe extern "C" fn(*mut *mut c_void) -> *mut c_void,
    run: unsafe extern "C" fn(*mut c_void, *const Launch),
    drop: unsafe extern "C" fn(*mut c_void),
}

/// Grid and block, as `prelude.h` has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Launch {
    grid: [c_uint; 3],
    block: [c_uint; 3],
}

/// What is loaded, by handle; a function goes with its module.
#[derive(Debug, Default)]
struct Table {
    modules: HashMap<usize, Arc<Module>>,
    functions: HashMap<usize, Arc<Function>>,
}

fn table() -> MutexGuard<'static, Table> {
    static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn function(&self, handle: hipFunction_t) -> Result<Arc<Function>> {
        self.functions.get(&handle.addr()).cloned().ok_or(hipErrorInvalidHandle)
    }
}

/// Bytes of the ELF file that begins there: it ends with its table of sections.
///
/// # Safety
/// Four bytes are readable there, and a whole header if they are ELF's.
unsafe fn elf_len(image: *const u8) -> Option<usize> {
    /// Where in the header it says: where the table is, how long an entry, and how many.
    const TABLE: usize = 0x28;
    const ENTRY: usize = 0x3a;
    const COUNT: usize = 0x3c;
    // SAFETY: the caller's contract.
    unsafe {
        if image.cast::<[u8; 4]>().read() != *b"\x7fELF" {
            return None;
        }
        let table = image.add(TABLE).cast::<u64>().read_unaligned();
        let [entry, count] = [ENTRY, COUNT].map(|at| image.add(at).cast::<u16>().read_unaligned());
        Some(table as usize + usize::from(entry) * usize::from(count))
    }
}

impl Module {
    fn load(code: &[u8]) -> Result<Self> {
        let file = new_file(0)?;
        let mut rest = code;
        while !rest.is_empty() {
            let written = write(&file, rest).map_err(|_| hipErrorOutOfMemory)?;
            rest = &rest[written..];
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        // SAFETY: our own compiler's output, whose constructors do nothing.
        let library = unsafe { Library::new(path) }.map_err(|_| hipErrorInvalidImage)?;
        let module = Self { library, _file: file };
        // SAFETY: `compile` puts a text there.
        let architecture = unsafe {
            let symbol = module.library.get::<*const c_char>(b"hip_shim_architecture\0");
            let symbol = symbol.map_err(|_| hipErrorInvalidImage)?;
            CStr::from_ptr(symbol.try_as_raw_ptr().ok_or(hipErrorInvalidImage)?.cast())
        };
        // Code for no features in particular runs with any.
        let own = format!("{TARGET}{}", settings().architecture);
        let fits = [own.as_str(), own.split(':').next().unwrap_or(&own)];
        if !fits.iter().any(|fits| architecture.to_bytes() == fits.as_bytes()) {
            return Err(hipErrorNoBinaryForGpu);
        }
        Ok(module)
    }

    fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let symbol = |what: &str| format!("hip_shim_{what}_{name}\0");
        // SAFETY: the signatures are those of `prelude.h`; the module outlives the pointers, since
        // the function holds it.
        unsafe {
            let missing = |_| hipErrorNotFound;
            let library = &self.library;
            Ok(Function {
                pack: *library.get(symbol("pack").as_bytes()).map_err(missing)?,
                run: *library.get(symbol("run").as_bytes()).map_err(missing)?,
                drop: *library.get(symbol("drop").as_bytes()).map_err(missing)?,
                module: Arc::clone(self),
            })
        }
    }
}

pub(crate) unsafe fn hipModuleLoadData(place: *mut hipModule_t, image: *const c_void) -> Result {
    check_device(current_device())?;
    capture::refuse_unsafe()?;
    if image.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: a whole code object.
    let code = unsafe {
        let len = elf_len(image.cast()).ok_or(hipErrorInvalidImage)?;
        std::slice::from_raw_parts(image.cast(), len)
    };
    let module = Arc::new(Module::load(code)?);
    let handle = Arc::as_ptr(&module).addr();
    table().modules.insert(handle, module);
    // SAFETY: the caller's contract.
    unsafe { put(place, std::ptr::without_provenance_mut(handle)) }
}

pub(crate) unsafe fn hipModuleUnload(module: hipModule_t) -> Result {
    let mut table = table();
    let module = table.modules.remove(&module.addr()).ok_or(hipErrorInvalidHandle)?;
    table.functions.retain(|_, function| !Arc::ptr_eq(&function.module, &module));
    Ok(())
}

pub(crate) unsafe fn hipModuleGetFunction(
    place: *mut hipFunction_t,
    module: hipModule_t,
    name: *const c_char,
) -> Result {
    if name.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: it is not null, so it ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let mut table = table();
    let module = table.modules.get(&module.addr()).ok_or(hipErrorInvalidHandle)?;
    let function = Arc::new(module.function(&name)?);
    let handle = Arc::as_ptr(&function).addr();
    table.functions.insert(handle, function);
    // SAFETY: the caller's contract.
    unsafe { put(place, std::ptr::without_provenance_mut(handle)) }
}

pub(crate) unsafe fn hipFuncGetAttribute(
    place: *mut c_int,
    attribute: hipFunction_attribute,
    function: hipFunction_t,
) -> Result {
    table().function(function)?;
    let value = match attribute {
        HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => MAX_THREADS as c_int,
        HIP_FUNC_ATTRIBUTE_NUM_REGS => 64,
        HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        | HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES
        | HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES => 0,
        _ => return Err(hipErrorInvalidValue),
    };
    // SAFETY: the caller's contract.
    unsafe { put(place, value) }
}

pub(crate) unsafe fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
    place: *mut c_int,
    function: hipFunction_t,
    block_threads: c_int,
    _shared_bytes: usize,
) -> Result {
    table().function(function)?;
    if !(1..=MAX_THREADS as c_int).contains(&block_threads) {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract.
    unsafe { put(place, BLOCKS) }
}

/// Arguments of one launch.
struct Packed {
    function: Arc<Function>,
    arguments: *mut c_void,
}

// SAFETY: the arguments are numbers and addresses that only this owner touches.
unsafe impl Send for Packed {}

impl Packed {
    /// # Safety
    /// As the kernel that is launched asks.
    unsafe fn run(&self, launch: Launch) {
        // SAFETY: packed by the same function; the rest is the caller's contract.
        unsafe { (self.function.run)(self.arguments, &launch) }
    }
}

impl Drop for Packed {
    fn drop(&mut self) {
        // SAFETY: packed by the same function, dropped once.
        unsafe { (self.function.drop)(self.arguments) }
    }
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
    _shared_bytes: c_uint,
    stream: hipStream_t,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let function = table().function(function)?;
    let launch = Launch {
        grid: [grid_dim_x, grid_dim_y, grid_dim_z],
        block: [block_dim_x, block_dim_y, block_dim_z],
    };
    let threads = launch.block.into_iter().try_fold(1_u32, u32::checked_mul).unwrap_or(0);
    if launch.grid.contains(&0) || !(1..=MAX_THREADS).contains(&threads) {
        return Err(hipErrorInvalidConfiguration);
    }
    if !extra.is_null() {
        return Err(hipErrorNotSupported);
    }
    // SAFETY: the caller's contract: the kernel's arguments, which are copied here.
    let arguments = unsafe { (function.pack)(arguments) };
    let packed = Packed { function, arguments };
    // SAFETY: who launches a kernel promises what it touches until the stream is past it.
    let run = move || unsafe { packed.run(launch) };
    submit(stream, Work::Run(Box::new(run))).map(drop)
}
