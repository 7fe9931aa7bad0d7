//! What several tests of the engine need.

use kvferry_device::{DeviceUuid, Export};
use kvferry_engine::{AllocationKey, Exports, ExportsError, Mismatch, Probe};

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
