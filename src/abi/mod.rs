//! The C ABI: what `include/kvferry.h` declares, one exported function and the table behind it.
//!
//! Handles are numbers that are looked up, never pointers, so a stale or a foreign one is an answer
//! and not a crash. Every call runs in `guard::call`, which lets no panic out and refuses forked
//! processes.

mod calls;
mod guard;
pub mod numbers;
mod plugin;
mod status;
mod submit;
pub mod types;

use std::sync::Arc;

use kvferry_node::Node;

pub use types::Api;

/// A handle of an engine that Rust made, for tests: no name opens a simulated GPU.
pub fn adopt(node: Arc<Node>) -> types::EngineHandle {
    plugin::insert(node)
}

/// The table of version 1.
static API: Api = Api {
    struct_size: size_of::<Api>() as u64,
    abi_version: types::ABI_VERSION,
    reserved: 0,
    version: calls::version,
    last_error: calls::last_error,
    create: calls::create,
    destroy: calls::destroy,
    name: calls::name,
    device: calls::device,
    register_memory: calls::register_memory,
    unregister_memory: calls::unregister_memory,
    allocate: calls::allocate,
    free: calls::free,
    open: calls::open,
    import_segment: calls::import_segment,
    export_segment: calls::export_segment,
    refresh: calls::refresh,
    close: calls::close,
    submit_ranges: submit::ranges,
    submit_strided: submit::strided,
    submit_paged: submit::paged,
    submit_requests: submit::requests,
    poll: submit::poll,
    wait: submit::wait,
    signal: submit::signal,
    release: submit::release,
    event_descriptor: calls::event_descriptor,
    statistics: calls::statistics,
    cancel: submit::cancel,
    record_step: calls::record_step,
};

/// The table of functions; null if this library does not know the version.
// SAFETY: no other library exports a symbol of this name.
#[unsafe(no_mangle)]
pub extern "C" fn kvferry_load(abi_version: u32) -> *const Api {
    if abi_version == types::ABI_VERSION { &API } else { std::ptr::null() }
}
