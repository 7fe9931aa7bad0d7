//! What several of the topics need.

use std::sync::Arc;
use std::time::Duration;

use kvferry_device::Device;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{BatchId, Buffer, Engine, Op, Range, State, Target};

use crate::common::{NoExports, config};

pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn engine_on(devices: Vec<Arc<dyn Device>>) -> Arc<Engine> {
    Engine::new(config(&[]), devices).expect("an engine")
}

pub(crate) fn simulated(ordinal: u32) -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions { ordinal, ..SimOptions::default() }).expect("always there")
}

pub(crate) fn direct(importer: &Engine, exporter: &Engine) -> Target {
    importer.open("direct", exporter.segment(), Arc::new(NoExports)).expect("opens")
}

pub(crate) fn finish(engine: &Engine, id: BatchId) -> State {
    let status = engine.wait(id, LONG).expect("known");
    assert_ne!(status.state, State::Running, "the batch never ended");
    engine.release(id).expect("it ended");
    status.state
}

pub(crate) fn transfer(engine: &Engine, target: &Target, op: Op, ranges: &[Range]) {
    let id = engine.submit(target, op, ranges).expect("submits");
    assert_eq!(finish(engine, id), State::Completed);
}

pub(crate) fn bytes(buffer: &Buffer, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buffer.read(offset, &mut bytes).expect("inside");
    bytes
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u64).wrapping_mul(0x9E37_79B9) as u8 ^ seed).collect()
}

pub(crate) fn host_pair() -> (Arc<Engine>, Arc<Engine>, Arc<dyn Device>) {
    let host = kvferry_device::host().expect("always there");
    (engine_on(vec![host.clone()]), engine_on(vec![host.clone()]), host)
}
