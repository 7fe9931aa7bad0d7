//! What several tests of the engine need.

// Each test is a program of its own and uses some of it.
#![allow(dead_code)]

pub(crate) mod log;
pub(crate) mod relay;

use kvferry_device::{DeviceUuid, Export};
use kvferry_engine::{AllocationKey, Config, Exports, ExportsError, Mismatch, Probe};

/// With these knobs, nothing of the environment, and nothing kept on the disk.
pub(crate) fn config(knobs: &[(&str, &str)]) -> Config {
    let lookup = |name: &str| {
        let mut set = knobs.iter().chain(&[("MC_KVFERRY_CACHE_DIR", "off")]);
        set.find(|(knob, _)| *knob == name).map(|(_, value)| value.into())
    };
    Config::from_lookup(lookup).expect("good knobs")
}

/// Of targets in this process, whose memory is used directly.
#[derive(Debug)]
pub(crate) struct NoExports;

impl Exports for NoExports {
    fn fetch(&self, _: AllocationKey) -> Result<Export, ExportsError> {
        Err("nothing may ask for an export here".into())
    }

    fn probe(&self, _: DeviceUuid) -> Result<Probe, ExportsError> {
        Err("nothing may ask for a proof here".into())
    }

    fn prove(&self, _: AllocationKey, _: u64) -> Result<Option<Mismatch>, ExportsError> {
        Err("nothing may ask for a verdict here".into())
    }
}
