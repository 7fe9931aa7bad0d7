//! Calls that bytes decide: what the fuzz target runs, and the test of its corpus.

use std::sync::Mutex;

use rand::RngCore;

use super::calls::{Arena, World};
use super::engines::{Gpu, api, engine, last_error};

/// Random numbers from bytes, and zeros behind their end. Each byte decides one thing.
struct Bytes<'a>(&'a [u8]);

impl RngCore for Bytes<'_> {
    fn next_u32(&mut self) -> u32 {
        let mut byte = [0];
        self.fill_bytes(&mut byte);
        // Numbers of any range are taken from the high bits.
        u32::from_ne_bytes([byte[0]; 4])
    }

    fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.fill_bytes(&mut bytes);
        u64::from_ne_bytes(bytes)
    }

    fn fill_bytes(&mut self, to: &mut [u8]) {
        let (now, later) = self.0.split_at(to.len().min(self.0.len()));
        to[..now.len()].copy_from_slice(now);
        to[now.len()..].fill(0);
        self.0 = later;
    }
}

/// One engine of host memory and one of a simulated GPU, and calls until the bytes end: how often each
/// status was the answer.
pub(crate) fn calls(data: &[u8]) -> [u32; 16] {
    static MEMORY: Mutex<Arena> = Mutex::new([0; _]);
    let mut memory = MEMORY.lock().expect("no call panics");
    let engines = Mutex::new(vec![engine(), Gpu::shared().engine()]);
    let mut world = World::new(&engines, &raw mut *memory);
    let (mut bytes, mut statuses) = (Bytes(data), [0; 16]);
    while !bytes.0.is_empty() {
        let status = world.call(&mut bytes);
        assert_ne!(status, 12, "a fault of the library's own: {}", last_error());
        statuses[status as usize] += 1;
    }
    world.wait_for_all();
    for engine in engines.into_inner().expect("whole") {
        // SAFETY: a number.
        assert_eq!(unsafe { (api().destroy)(engine) }, 0, "{}", last_error());
    }
    statuses
}
