//! What the environment asks for, read once.

use std::ffi::c_int;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::OnceLock;

use hip_sys::{hipError_t, hipErrorInvalidDevice, hipErrorNoDevice};

/// Version of the runtime.
const DEFAULT_VERSION: c_int = crate::VERSION as c_int;

/// From 7.13 on `hipMemRetainAllocationHandle` takes a reference, as CUDA's does.
const FORWARDING_VERSION: c_int = 71_300_000;

/// How calls are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Simulated,
    /// By libcuda and NVRTC.
    Forwarding,
}

#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    /// Simulated GPUs of this process, by their number in the machine.
    pub(crate) devices: Vec<u32>,
    /// What calls say where there are none.
    pub(crate) no_device: hipError_t,
    /// Full name, features included.
    pub(crate) architecture: String,
    pub(crate) version: c_int,
    /// Bytes of each GPU.
    pub(crate) memory_bytes: u64,
    /// Whether GPUs reach each other's memory.
    pub(crate) peers: bool,
}

impl Settings {
    pub(crate) fn major(&self) -> c_int {
        self.version / 10_000_000
    }
}

/// Whether calls go to CUDA.
pub(crate) fn mode() -> Mode {
    settings().mode
}

/// # Panics
/// If a variable has no meaning: a test that asks for something must not pass without it.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let mode = match variable("KVFERRY_HIP_SHIM", "simulated".to_owned()).as_str() {
            "simulated" => Mode::Simulated,
            "cuda" => Mode::Forwarding,
            other => panic!("KVFERRY_HIP_SHIM={other}: simulated or cuda"),
        };
        let no_device = match variable("KVFERRY_HIP_SHIM_NO_DEVICE", 100) {
            100 => hipErrorNoDevice,
            101 => hipErrorInvalidDevice,
            other => panic!("KVFERRY_HIP_SHIM_NO_DEVICE={other}: 100 or 101"),
        };
        Settings {
            mode,
            devices: visible(variable("KVFERRY_HIP_SHIM_DEVICES", 2)),
            no_device,
            architecture: variable(
                "KVFERRY_HIP_SHIM_ARCHITECTURE",
                "gfx942:sramecc+:xnack-".to_owned(),
            ),
            version: match mode {
                Mode::Simulated => variable("KVFERRY_HIP_SHIM_VERSION", DEFAULT_VERSION),
                Mode::Forwarding => FORWARDING_VERSION,
            },
            memory_bytes: variable("KVFERRY_HIP_SHIM_MEMORY", 64 << 30),
            peers: variable("KVFERRY_HIP_SHIM_PEERS", 1) != 0,
        }
    })
}

fn variable<T: FromStr<Err: Display>>(name: &str, otherwise: T) -> T {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")),
        Err(_) => otherwise,
    }
}

/// Those of the machine's `count` GPUs that HIP_VISIBLE_DEVICES leaves.
fn visible(count: u32) -> Vec<u32> {
    let Ok(list) = std::env::var("HIP_VISIBLE_DEVICES") else { return (0..count).collect() };
    // The list ends where it stops to make sense, as AMD's does.
    list.split(',').map_while(|text| text.trim().parse().ok().filter(|&at| at < count)).collect()
}
