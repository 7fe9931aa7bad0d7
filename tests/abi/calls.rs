//! One random call after the other, with arguments that are right, wrong, stale, foreign or null.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvferry::abi::numbers::RUNNING;
use kvferry::abi::types::*;
use rand::{Rng, RngCore};

use super::engines::{Gpu, api, engine};

/// Memory that callers register. It outlives the engines: only who frees memory under a registered
/// region breaks the contract, and calls here do not.
pub(crate) type Arena = [u64; 8 << 10];

/// What one caller has come by.
pub(crate) struct World<'a> {
    /// Of all callers.
    engines: &'a Mutex<Vec<EngineHandle>>,
    arena: u64,
    addresses: Vec<u64>,
    targets: Vec<TargetHandle>,
    batches: Vec<BatchHandle>,
    /// Those of them that callers have forgotten since.
    forgotten: Vec<BatchHandle>,
    ordered: u32,
}

/// Numbers that a caller may hold by mistake, and some that are right.
fn number(random: &mut dyn RngCore, right: &[u64]) -> u64 {
    match random.random_range(0..12) {
        0 => 0,
        1 => u64::MAX,
        2 => random.random(),
        _ => pick(random, right).unwrap_or(1),
    }
}

fn pick<T: Copy>(random: &mut dyn RngCore, from: &[T]) -> Option<T> {
    from.get(random.random_range(0..from.len().max(1))).copied()
}

fn one_in(random: &mut dyn RngCore, many: u32) -> bool {
    random.random_range(0..many) == 0
}

/// The pointer, or seldom null, or a misaligned one, which is not followed.
fn pointer<T>(random: &mut dyn RngCore, right: *const T) -> *const T {
    match random.random_range(0..20) {
        0 => null(),
        1 if align_of::<T>() > 1 => right.wrapping_byte_add(1),
        _ => right,
    }
}

fn place<T>(random: &mut dyn RngCore, right: *mut T) -> *mut T {
    pointer(random, right).cast_mut()
}

/// The size of a structure as callers of other versions have it, or one that cannot be; never more
/// than there is.
fn struct_size<T>(random: &mut dyn RngCore) -> u64 {
    let whole = size_of::<T>() as u64;
    match random.random_range(0..8) {
        0 => 0,
        1 => u64::MAX,
        2 => 8 * random.random_range(1..=whole / 8),
        3 => random.random_range(0..=whole),
        _ => whole,
    }
}

/// How many entries a list has, or a number that no list can have.
fn count(random: &mut dyn RngCore, right: usize) -> usize {
    match random.random_range(0..12) {
        0 => 0,
        1 => usize::MAX,
        2 => usize::MAX / 8,
        _ => right,
    }
}

impl<'a> World<'a> {
    /// `arena` stays as long as the engines.
    pub(crate) fn new(engines: &'a Mutex<Vec<EngineHandle>>, arena: *mut Arena) -> Self {
        let arena = arena as u64;
        let (addresses, targets, batches, forgotten) = Default::default();
        Self { engines, arena, addresses, targets, batches, forgotten, ordered: 0 }
    }

    /// How many batches were submitted behind a stream or an event of an application's.
    pub(crate) fn ordered(&self) -> u32 {
        self.ordered
    }

    /// Waits for every batch that it submitted: one that was not asked for keeps the regions in use that
    /// it names, in other engines, too.
    pub(crate) fn wait_for_all(&self) {
        for &batch in self.batches.iter().chain(&self.forgotten) {
            // SAFETY: all zeros are a value of it.
            let mut found: BatchStatus = unsafe { std::mem::zeroed() };
            found.struct_size = size_of::<BatchStatus>() as u64;
            // SAFETY: numbers, and what the header asks for.
            let status = unsafe { (api().wait)(batch, u64::from(u32::MAX), &mut found) };
            // Its engine may be gone, or it was released.
            assert!(status != 0 || found.state != RUNNING, "a batch that does not end");
        }
    }

    fn engines(&self) -> MutexGuard<'_, Vec<EngineHandle>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(&self, random: &mut dyn RngCore) -> u64 {
        let right = match one_in(random, 3) {
            true => &[self.arena][..],
            false => &self.addresses,
        };
        number(random, right).wrapping_add(random.random_range(0..3) * 4096)
    }

    /// Makes one call, and says how it was answered.
    pub(crate) fn call(&mut self, random: &mut dyn RngCore) -> Status {
        let mut made = BatchHandle::default();
        let mut ordered = false;
        let status = self.any(random, &mut made, &mut ordered);
        if status == 0 && made != BatchHandle::default() {
            self.ordered += u32::from(ordered);
            self.batches.push(made);
            if self.batches.len() > 32 {
                self.forgotten.push(self.batches.remove(0));
            }
        }
        status
    }

    fn any(
        &mut self,
        random: &mut dyn RngCore,
        made: &mut BatchHandle,
        ordered: &mut bool,
    ) -> Status {
        let api = api();
        let any_engine = {
            let engines = self.engines();
            number(random, &engines)
        };
        let target = pick(random, &self.targets).unwrap_or_default();
        let target = match random.random_range(0..8) {
            0 => TargetHandle { engine: any_engine, ..target },
            1 => TargetHandle { id: random.random(), ..target },
            _ => target,
        };
        let batch = pick(random, &self.batches).unwrap_or_default();
        let batch = match random.random_range(0..8) {
            0 => BatchHandle { engine: any_engine, ..batch },
            1 => BatchHandle { id: random.random(), ..batch },
            _ => batch,
        };
        let (local, remote) = (self.address(random), self.address(random));
        let length = number(random, &[1, 64, 4096, 5000]);
        let opcode = random.random_range(0..3);
        let producer_kind = [0, 0, 1, 2, 3][random.random_range(0..5)];
        let producer = match producer_kind {
            1 => self.stream(random),
            2 => pick(random, &Gpu::shared().events().collect::<Vec<_>>()).unwrap_or(null_mut()),
            _ => null_mut(),
        };
        let options = SubmitOptions {
            struct_size: struct_size::<SubmitOptions>(random),
            producer_kind,
            without_kernel: random.random_range(0..2),
            producer,
            offload_mode: random.random_range(0..5),
            reserved: u32::from(one_in(random, 12)),
            behind: pointer(random, &raw const batch),
            behind_count: random.random_range(0..2),
        };
        let options = if random.random() { &raw const options } else { null() };
        *ordered = (producer_kind == 1 || producer_kind == 2) && !options.is_null();
        let made_at = place(random, made);
        let mut text = [0 as c_char; 600];
        let size = random.random_range(0..text.len());
        let mut needed = 0;
        let needed_at = if random.random() { &raw mut needed } else { null_mut() };
        // SAFETY: pointers are to what the header asks for, or are not followed: null and
        // misaligned ones, and those of lists of an impossible length.
        unsafe {
            match random.random_range(0..27) {
                0 => self.create_or_destroy(random),
                1 => (api.destroy)(number(random, &[0])),
                2 => {
                    let to = if one_in(random, 9) { null_mut() } else { text.as_mut_ptr() };
                    (api.name)(any_engine, to, size, needed_at)
                }
                3 => {
                    let index = random.random_range(0..3);
                    (api.device)(any_engine, index, text.as_mut_ptr(), size, needed_at)
                }
                4 => {
                    let (mut address, device) = (0, random.random_range(0..2));
                    let to = place(random, &mut address);
                    let status = (api.allocate)(any_engine, device, length.min(1 << 16), to);
                    if status == 0 {
                        self.addresses.push(address);
                    }
                    status
                }
                5 if self.addresses.len() > 8 => {
                    let address = self.addresses.remove(0);
                    (api.free)(any_engine, address)
                }
                5 => (api.free)(any_engine, local),
                6 => {
                    let mut served = 0;
                    let at = number(random, &[self.arena; 3]).wrapping_add(opcode.into());
                    (api.register_memory)(any_engine, at, length, place(random, &mut served))
                }
                7 => (api.unregister_memory)(any_engine, number(random, &[self.arena])),
                8 | 9 => self.open(random, any_engine),
                10 => self.import(random, any_engine),
                11 => (api.refresh)(target),
                12 if self.targets.len() > 6 => (api.close)(self.targets.remove(0)),
                12 => (api.close)(target),
                13 | 14 => {
                    let range = RangeEntry { local, remote, len: length };
                    let (list, count) = (pointer(random, &range), count(random, 1));
                    (api.submit_ranges)(target, opcode, list, count, options, made_at)
                }
                15 => {
                    let form = Strided {
                        local,
                        remote,
                        length,
                        count: number(random, &[1, 3]),
                        local_stride: number(random, &[64, 4096]),
                        remote_stride: number(random, &[64, 4096]),
                    };
                    let (list, count) = (pointer(random, &form), count(random, 1));
                    (api.submit_strided)(target, opcode, list, count, options, made_at)
                }
                16 => {
                    let numbers = [0_u32, 1, random.random()];
                    let mut pages = |address| Pages {
                        address,
                        numbers: pointer(random, numbers.as_ptr()),
                        count: 2,
                        page_stride: 64,
                        layer_stride: length,
                        row_stride: 0,
                    };
                    let (local, remote) = (pages(local), pages(remote));
                    let form = Paged { local, remote, layers: opcode, rows: 1, row_bytes: 64 };
                    let (list, count) = (pointer(random, &form), count(random, 1));
                    (api.submit_paged)(target, opcode, list, count, options, made_at)
                }
                17 => {
                    let reserved = u32::from(one_in(random, 12));
                    let (source, offset) = (local, remote);
                    let requests =
                        [Request { opcode, reserved, source, target, offset, length }; 2];
                    let right = random.random_range(0..3);
                    let (list, count) = (pointer(random, requests.as_ptr()), count(random, right));
                    (api.submit_requests)(any_engine, list, count, options, made_at)
                }
                18 | 19 => {
                    let mut found: BatchStatus = std::mem::zeroed();
                    found.struct_size = struct_size::<BatchStatus>(random);
                    let timeout = u64::from(random.random::<u8>());
                    (api.wait)(batch, timeout, place(random, &mut found))
                }
                20 => {
                    let mut found: BatchStatus = std::mem::zeroed();
                    found.struct_size = struct_size::<BatchStatus>(random);
                    (api.poll)(batch, place(random, &mut found))
                }
                21 => (api.release)(batch),
                22 => (api.event_descriptor)(any_engine, place(random, &mut 0)),
                23 => (api.cancel)(batch),
                24 => (api.signal)(batch, self.stream(random)),
                25 => {
                    let device = random.random_range(0..3);
                    (api.record_step)(any_engine, device, random.random())
                }
                _ => {
                    let mut found: Statistics = std::mem::zeroed();
                    found.struct_size = struct_size::<Statistics>(random);
                    (api.statistics)(any_engine, place(random, &mut found))
                }
            }
        }
    }

    /// A stream of the application's, or NULL, which is one, too.
    fn stream(&self, random: &mut dyn RngCore) -> *mut c_void {
        pick(random, &Gpu::shared().streams().collect::<Vec<_>>()).unwrap_or(null_mut())
    }

    fn new_engine(&self, random: &mut dyn RngCore) -> EngineHandle {
        if random.random() { Gpu::shared().engine() } else { engine() }
    }

    /// Some engines, not always the same.
    fn create_or_destroy(&self, random: &mut dyn RngCore) -> Status {
        let mut engines = self.engines();
        if engines.len() < 4 {
            drop(engines);
            let engine = self.new_engine(random);
            self.engines().push(engine);
            return 0;
        }
        let at = random.random_range(0..engines.len());
        let engine = engines.remove(at);
        drop(engines);
        // SAFETY: a number.
        unsafe { (api().destroy)(engine) }
    }

    fn open(&mut self, random: &mut dyn RngCore, any_engine: EngineHandle) -> Status {
        let api = api();
        let (mut text, mut opened) = ([0 as c_char; 600], TargetHandle::default());
        // SAFETY: as in `any`.
        let status = unsafe {
            let named = (api.name)(any_engine, text.as_mut_ptr(), text.len(), null_mut());
            let name = if named == 0 { text.as_ptr() } else { c"nobody".as_ptr() };
            let name = if one_in(random, 12) { null() } else { name };
            let from = number(random, &self.engines());
            (api.open)(from, name, place(random, &mut opened))
        };
        if status == 0 {
            self.targets.push(opened);
        }
        status
    }

    fn import(&mut self, random: &mut dyn RngCore, any_engine: EngineHandle) -> Status {
        let api = api();
        let (mut blob, mut size, mut opened) = (vec![0_u8; 64 << 10], 0, TargetHandle::default());
        // SAFETY: as in `any`.
        let status = unsafe {
            let to = blob.as_mut_ptr().cast::<c_void>();
            if (api.export_segment)(any_engine, to, blob.len(), &mut size) == 0 && random.random() {
                let at = random.random_range(0..size);
                blob[at] ^= 1 << random.random_range(0..8);
            }
            let from = pointer(random, blob.as_ptr()).cast();
            (api.import_segment)(any_engine, from, size, place(random, &mut opened))
        };
        if status == 0 {
            self.targets.push(opened);
        }
        status
    }
}
