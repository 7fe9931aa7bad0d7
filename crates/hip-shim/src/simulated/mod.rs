//! GPUs on the CPU: memory of the host is theirs, and a thread runs the work of each stream.
//!
//! Stricter than AMD's library: names that were destroyed are refused, and every copy is deferred,
//! of pageable memory, too.

mod attributes;
mod capture;
mod compile;
mod copy;
mod device;
mod event;
mod host_memory;
mod ipc;
mod kernel;
mod memory;
mod pool;
mod stream;
mod virtual_memory;

pub(crate) use self::attributes::*;
pub(crate) use self::capture::*;
pub(crate) use self::compile::*;
pub(crate) use self::copy::*;
pub(crate) use self::device::*;
pub(crate) use self::event::*;
pub(crate) use self::host_memory::*;
pub(crate) use self::ipc::*;
pub(crate) use self::kernel::*;
pub(crate) use self::memory::*;
pub(crate) use self::pool::*;
pub(crate) use self::stream::*;
pub(crate) use self::virtual_memory::*;
