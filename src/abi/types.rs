//! The structures and functions of `include/kvferry.h`, field by field; a test compares the two.

use std::ffi::{c_char, c_int, c_void};

use crate::Range;

pub use super::numbers::ABI_VERSION;

/// `kvferry_status`.
pub type Status = i32;
/// `kvferry_engine`.
pub type EngineHandle = u64;

/// `kvferry_target`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct TargetHandle {
    /// Its engine.
    pub engine: EngineHandle,
    /// Which of that engine's.
    pub id: u64,
}

/// `kvferry_batch`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BatchHandle {
    /// Its engine.
    pub engine: EngineHandle,
    /// Which of that engine's.
    pub id: u64,
}

/// `kvferry_config`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    /// As the caller was compiled.
    pub struct_size: u64,
    /// Names with commas between, or null.
    pub devices: *const c_char,
    /// `host:port`, or null.
    pub listen: *const c_char,
    /// `host:port`, or null.
    pub name: *const c_char,
    /// `host:port`, or null.
    pub batch_listen: *const c_char,
    /// `NAME=value` each.
    pub settings: *const *const c_char,
    /// How many.
    pub settings_count: u64,
}

/// `kvferry_range`.
pub type RangeEntry = Range;

/// `kvferry_strided`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Strided {
    /// First byte of the first piece here.
    pub local: u64,
    /// First byte of the first piece there.
    pub remote: u64,
    /// Bytes of a piece.
    pub length: u64,
    /// Pieces.
    pub count: u64,
    /// Bytes from a piece here to the next.
    pub local_stride: u64,
    /// Bytes from a piece there to the next.
    pub remote_stride: u64,
}

/// `kvferry_pages`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Pages {
    /// Where page 0 begins.
    pub address: u64,
    /// Numbers of the pages.
    pub numbers: *const u32,
    /// How many.
    pub count: u64,
    /// Bytes from a page to the next.
    pub page_stride: u64,
    /// Bytes from a layer to the next.
    pub layer_stride: u64,
    /// Bytes from a row to the next.
    pub row_stride: u64,
}

/// `kvferry_paged`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Paged {
    /// This end.
    pub local: Pages,
    /// The target's end.
    pub remote: Pages,
    /// Layers.
    pub layers: u32,
    /// Rows of a page.
    pub rows: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
}

/// `kvferry_request`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Request {
    /// Read 0, write 1.
    pub opcode: u32,
    /// Zero.
    pub reserved: u32,
    /// First byte here.
    pub source: u64,
    /// The other end.
    pub target: TargetHandle,
    /// First byte there.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// `kvferry_submit_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SubmitOptions {
    /// As the caller was compiled.
    pub struct_size: u64,
    /// None 0, stream 1, event 2.
    pub producer_kind: u32,
    /// Whether copy engines do everything.
    pub without_kernel: u32,
    /// The stream or event.
    pub producer: *mut c_void,
    /// Auto 0, direct 1, kernel 2, staged 3.
    pub offload_mode: u32,
    /// Zero.
    pub reserved: u32,
    /// Batches to run behind.
    pub behind: *const BatchHandle,
    /// How many.
    pub behind_count: u64,
}

/// `kvferry_batch_status`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchStatus {
    /// As the caller was compiled.
    pub struct_size: u64,
    /// Running 0, completed 1, failed 2.
    pub state: u32,
    /// What moves the bytes.
    pub path: u32,
    /// Bytes that have landed.
    pub bytes: u64,
    /// Of a failed batch.
    pub failure: Status,
    /// Zero.
    pub reserved: u32,
}

/// `kvferry_path_statistics`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PathStatistics {
    /// Of which every byte landed.
    pub completed: u64,
    /// For another reason than that they were cancelled.
    pub failed: u64,
    /// Before all was moved.
    pub cancelled: u64,
    /// Of those that completed.
    pub bytes: u64,
}

/// `kvferry_statistics`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Statistics {
    /// As the caller was compiled.
    pub struct_size: u64,
    /// Page-locked memory of the engine's own.
    pub pinned_bytes: u64,
    /// Of it, for TCP.
    pub staging_bytes: u64,
    /// Connections that were closed for what they said.
    pub rejected_connections: u64,
    /// Batches that went a slower way.
    pub fallbacks: u64,
    /// Submissions.
    pub refused: u64,
    /// Batches.
    pub running: u64,
    /// Registered.
    pub regions: u64,
    /// Of all regions.
    pub registered_bytes: u64,
    /// Of other processes' allocations.
    pub mappings: u64,
    /// Whose these are.
    pub mapped_peers: u64,
    /// For staged offload.
    pub bounce_bytes: u64,
    /// Registered memory that is page-locked.
    pub locked_bytes: u64,
    /// By path number.
    pub paths: [PathStatistics; 8],
}

/// A structure that begins with its size, of which a caller may know less than this library.
///
/// # Safety
/// Plain numbers and pointers with `struct_size: u64` in front, for which all bytes zero is valid.
pub(super) unsafe trait Versioned: Copy {}

// SAFETY: as the trait wants.
unsafe impl Versioned for Config {}
// SAFETY: as the trait wants.
unsafe impl Versioned for SubmitOptions {}
// SAFETY: as the trait wants.
unsafe impl Versioned for BatchStatus {}
// SAFETY: as the trait wants.
unsafe impl Versioned for Statistics {}

type Text = unsafe extern "C" fn(*mut c_char, usize) -> usize;

/// `kvferry_api`. The header says what each function does.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "include/kvferry.h documents them")]
pub struct Api {
    pub struct_size: u64,
    pub abi_version: u32,
    pub reserved: u32,
    pub version: Text,
    pub last_error: Text,
    pub create: unsafe extern "C" fn(*const Config, *mut EngineHandle) -> Status,
    pub destroy: unsafe extern "C" fn(EngineHandle) -> Status,
    pub name: unsafe extern "C" fn(EngineHandle, *mut c_char, usize, *mut usize) -> Status,
    pub device: unsafe extern "C" fn(EngineHandle, u32, *mut c_char, usize, *mut usize) -> Status,
    pub register_memory: unsafe extern "C" fn(EngineHandle, u64, u64, *mut u32) -> Status,
    pub unregister_memory: unsafe extern "C" fn(EngineHandle, u64) -> Status,
    pub allocate: unsafe extern "C" fn(EngineHandle, u32, u64, *mut u64) -> Status,
    pub free: unsafe extern "C" fn(EngineHandle, u64) -> Status,
    pub open: unsafe extern "C" fn(EngineHandle, *const c_char, *mut TargetHandle) -> Status,
    pub import_segment:
        unsafe extern "C" fn(EngineHandle, *const c_void, usize, *mut TargetHandle) -> Status,
    pub export_segment:
        unsafe extern "C" fn(EngineHandle, *mut c_void, usize, *mut usize) -> Status,
    pub refresh: unsafe extern "C" fn(TargetHandle) -> Status,
    pub close: unsafe extern "C" fn(TargetHandle) -> Status,
    pub submit_ranges: Submit<RangeEntry>,
    pub submit_strided: Submit<Strided>,
    pub submit_paged: Submit<Paged>,
    pub submit_requests: unsafe extern "C" fn(
        EngineHandle,
        *const Request,
        usize,
        *const SubmitOptions,
        *mut BatchHandle,
    ) -> Status,
    pub poll: unsafe extern "C" fn(BatchHandle, *mut BatchStatus) -> Status,
    pub wait: unsafe extern "C" fn(BatchHandle, u64, *mut BatchStatus) -> Status,
    pub signal: unsafe extern "C" fn(BatchHandle, *mut c_void) -> Status,
    pub release: unsafe extern "C" fn(BatchHandle) -> Status,
    pub event_descriptor: unsafe extern "C" fn(EngineHandle, *mut c_int) -> Status,
    pub statistics: unsafe extern "C" fn(EngineHandle, *mut Statistics) -> Status,
    pub cancel: unsafe extern "C" fn(BatchHandle) -> Status,
    pub record_step: unsafe extern "C" fn(EngineHandle, u32, u64) -> Status,
}

type Submit<T> = unsafe extern "C" fn(
    TargetHandle,
    u32,
    *const T,
    usize,
    *const SubmitOptions,
    *mut BatchHandle,
) -> Status;
