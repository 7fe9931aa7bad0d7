//! The table of functions, and engines to call it with.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null;
use std::sync::{Arc, OnceLock};

use kvferry::abi::types::*;
use kvferry::abi::{Api, adopt, kvferry_load};
use kvferry::device::{Device, host};
use kvferry::node::{Node, NodeOptions};
use kvferry::{Config as Knobs, Engine};
use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{SimControl, SimOptions, SimStream, sim};

pub(crate) fn api() -> &'static Api {
    // SAFETY: the table is static.
    unsafe { kvferry_load(ABI_VERSION).as_ref() }.expect("its own version")
}

pub(crate) fn last_error() -> String {
    let mut text = [0 as c_char; 1024];
    // SAFETY: as many bytes as said.
    unsafe { (api().last_error)(text.as_mut_ptr(), text.len()) };
    // SAFETY: it ends with a zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

/// An engine of host memory.
pub(crate) fn engine() -> EngineHandle {
    let devices = CString::new("host").expect("no zero");
    let config = Config {
        struct_size: size_of::<Config>() as u64,
        devices: devices.as_ptr(),
        listen: null(),
        name: null(),
        batch_listen: null(),
        settings: null(),
        settings_count: 0,
    };
    let mut engine = 0;
    // SAFETY: all pointers are to what they say.
    let status = unsafe { (api().create)(&config, &mut engine) };
    assert_eq!(status, 0, "{}", last_error());
    engine
}

/// A simulated GPU, and work of an application's on it.
pub(crate) struct Gpu {
    device: Arc<dyn Device>,
    _control: Arc<SimControl>,
    streams: Vec<SimStream>,
    /// Addresses of events that were recorded into the streams.
    events: Vec<usize>,
}

impl Gpu {
    /// The one of this process.
    pub(crate) fn shared() -> &'static Self {
        static GPU: OnceLock<Gpu> = OnceLock::new();
        GPU.get_or_init(|| {
            let (device, control) = sim(&SimOptions::default()).expect("always there");
            // Before those of engines: NULL is the first one, and so an application's, as with vendors.
            let streams: Vec<_> = (0..3).map(|_| control.stream()).collect();
            let events = streams.iter().map(|stream| stream.record() as usize).collect();
            Self { device, _control: control, streams, events }
        })
    }

    /// An engine of it and of host memory.
    pub(crate) fn engine(&self) -> EngineHandle {
        let devices = vec![Arc::clone(&self.device), host().expect("always there")];
        let knobs = |name: &str| (name == "MC_KVFERRY_CACHE_DIR").then(|| "off".into());
        let knobs = Knobs::from_lookup(knobs).expect("good knobs");
        let engine = Engine::new(knobs, devices).expect("an engine");
        adopt(Node::start(engine, &NodeOptions::default()).expect("a node"))
    }

    pub(crate) fn streams(&self) -> impl Iterator<Item = *mut c_void> {
        self.streams.iter().map(SimStream::handle)
    }

    pub(crate) fn events(&self) -> impl Iterator<Item = *mut c_void> {
        self.events.iter().map(|&event| event as *mut c_void)
    }
}
