//! The C ABI as C sees it: the header's structures are the library's, and no sequence of calls with
//! wrong, stale or foreign arguments does anything but answer.

use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt::Write;
use std::mem::offset_of;
use std::process::Command;
use std::ptr::{null, null_mut};

use kvferry::abi::types::*;
use kvferry::abi::{Api, kvferry_load};
use kvferry_device::conformance::skip;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

fn api() -> &'static Api {
    // SAFETY: the table is static.
    unsafe { kvferry_load(ABI_VERSION).as_ref() }.expect("its own version")
}

fn last_error() -> String {
    let mut text = [0 as c_char; 1024];
    // SAFETY: as many bytes as said.
    unsafe { (api().last_error)(text.as_mut_ptr(), text.len()) };
    // SAFETY: it ends with a zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

macro_rules! assert_layout {
    ($out:ident, $($c:literal => $rust:ty { $($field:ident),* $(,)? })*) => {$(
        let _ = writeln!($out, "_Static_assert(sizeof({}) == {}, \"size\");", $c, size_of::<$rust>());
        let _ = writeln!($out, "_Static_assert(_Alignof({}) == {}, \"alignment\");", $c, align_of::<$rust>());
        $(let _ = writeln!(
            $out,
            "_Static_assert(offsetof({}, {}) == {}, \"{}\");",
            $c, stringify!($field), offset_of!($rust, $field), stringify!($field)
        );)*
    )*};
}

#[test]
fn the_headers_structures_are_the_librarys() {
    let mut source = String::from("#include \"kvferry.h\"\n");
    assert_layout! { source,
        "kvferry_target" => TargetHandle { engine, id }
        "kvferry_batch" => BatchHandle { engine, id }
        "kvferry_config" => Config { struct_size, devices, listen, name, batch_listen, settings, settings_count }
        "kvferry_strided" => Strided { local, remote, length, count, local_stride, remote_stride }
        "kvferry_pages" => Pages { address, numbers, count, page_stride, layer_stride, row_stride }
        "kvferry_paged" => Paged { local, remote, layers, rows, row_bytes }
        "kvferry_request" => Request { opcode, reserved, source, target, offset, length }
        "kvferry_submit_options" => SubmitOptions { struct_size, producer_kind, without_kernel, producer, offload_mode, reserved, behind, behind_count }
        "kvferry_batch_status" => BatchStatus { struct_size, state, path, bytes, failure, reserved }
        "kvferry_path_statistics" => PathStatistics { completed, failed, cancelled, bytes }
        "kvferry_statistics" => Statistics {
            struct_size, pinned_bytes, staging_bytes, rejected_connections, fallbacks, refused, running,
            regions, registered_bytes, mappings, mapped_peers, bounce_bytes, locked_bytes, paths,
        }
        "kvferry_api" => Api {
            struct_size, abi_version, reserved, version, last_error, create, destroy, name, device,
            register_memory, unregister_memory, allocate, free, open, import_segment,
            export_segment, refresh, close, submit_ranges, submit_strided, submit_paged,
            submit_requests, poll, wait, signal, release, event_descriptor, statistics, cancel,
        }
        "kvferry_status" => Status {}
        "kvferry_engine" => EngineHandle {}
    }
    // A range is the engine's own, so its length is named otherwise there.
    let _ = writeln!(
        source,
        "_Static_assert(sizeof(kvferry_range) == {}, \"\");",
        size_of::<RangeEntry>()
    );
    let _ = writeln!(
        source,
        "_Static_assert(offsetof(kvferry_range, remote) == {}, \"\");",
        offset_of!(RangeEntry, remote)
    );
    let _ = writeln!(
        source,
        "_Static_assert(offsetof(kvferry_range, length) == {}, \"\");",
        offset_of!(RangeEntry, len)
    );
    let _ = writeln!(source, "_Static_assert(KVFERRY_ABI_VERSION == {ABI_VERSION}, \"\");");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("layout.c");
    std::fs::write(&file, source).expect("a file");
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let compiled =
        Command::new("cc").args(["-std=c11", "-fsyntax-only", "-I", header]).arg(&file).output();
    match compiled {
        Err(error) => skip("cxx", &error),
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr))
        }
    }
}

#[test]
fn other_versions_have_no_table() {
    for version in [0, ABI_VERSION + 1, u32::MAX] {
        assert!(kvferry_load(version).is_null(), "{version}");
    }
    assert_eq!(api().struct_size, size_of::<Api>() as u64);
}

fn engine() -> EngineHandle {
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

/// Numbers that a caller may hold by mistake, and some that are right.
fn number(random: &mut StdRng, right: &[u64]) -> u64 {
    match random.random_range(0..6) {
        0 => 0,
        1 => u64::MAX,
        2 => random.random(),
        _ => right.get(random.random_range(0..right.len().max(1))).copied().unwrap_or(1),
    }
}

/// Whatever is called, with whatever numbers: a status, and memory that was not offered is not
/// touched. Pointers are right or null: a wild one is beyond any library.
#[test]
fn ten_thousand_random_calls_are_answered() {
    let seed = std::env::var("KVFERRY_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random::<u64>);
    println!("KVFERRY_TEST_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let api = api();
    let mut engines = vec![engine(), engine()];
    let mut addresses: Vec<u64> = Vec::new();
    let mut targets: Vec<TargetHandle> = Vec::new();
    let mut batches: Vec<BatchHandle> = Vec::new();
    let mut statuses = [0_u32; 16];
    for _ in 0..10_000 {
        let random = &mut random;
        let any_engine = number(random, &engines);
        let pick = |random: &mut StdRng, count: usize| random.random_range(0..count.max(1));
        let target = targets.get(pick(random, targets.len())).copied().unwrap_or_default();
        let target = match random.random_range(0..8) {
            0 => TargetHandle { engine: any_engine, ..target },
            1 => TargetHandle { id: random.random(), ..target },
            _ => target,
        };
        let batch = batches.get(pick(random, batches.len())).copied().unwrap_or_default();
        let batch = match random.random_range(0..8) {
            0 => BatchHandle { engine: any_engine, ..batch },
            1 => BatchHandle { id: random.random(), ..batch },
            _ => batch,
        };
        let address = |random: &mut StdRng| {
            number(random, &addresses).wrapping_add(random.random_range(0..3) * 4096)
        };
        let (local, remote) = (address(random), address(random));
        let length = number(random, &[1, 64, 4096, 5000]);
        let opcode = random.random_range(0..3);
        let mut options = SubmitOptions {
            struct_size: number(random, &[size_of::<SubmitOptions>() as u64; 4]).min(16),
            producer_kind: random.random_range(0..8) / 7 * 3,
            without_kernel: random.random_range(0..2),
            producer: null_mut(),
            offload_mode: random.random_range(0..5),
            reserved: 0,
            behind: &raw const batch,
            behind_count: random.random_range(0..2),
        };
        if random.random_range(0..4) > 0 {
            options.struct_size = size_of::<SubmitOptions>() as u64;
        }
        let options = if random.random() { &raw const options } else { null() };
        let mut made = BatchHandle::default();
        let made_at = if random.random_range(0..9) > 0 { &raw mut made } else { null_mut() };
        let mut text = [0 as c_char; 600];
        let size = random.random_range(0..text.len());
        let mut needed = 0;
        // SAFETY: pointers are null, or to what the header asks for.
        let status = unsafe {
            match random.random_range(0..24) {
                0 if engines.len() < 4 => {
                    engines.push(engine());
                    0
                }
                0 | 1 if engines.len() > 2 => {
                    let engine = engines.remove(0);
                    (api.destroy)(engine)
                }
                0 | 1 => (api.destroy)(number(random, &[0])),
                2 => (api.name)(any_engine, text.as_mut_ptr(), size, &mut needed),
                3 => (api.device)(
                    any_engine,
                    pick(random, 3) as u32,
                    text.as_mut_ptr(),
                    size,
                    null_mut(),
                ),
                4 => {
                    let mut address = 0;
                    let device = pick(random, 2) as u32;
                    let status =
                        (api.allocate)(any_engine, device, length.min(1 << 16), &mut address);
                    if status == 0 {
                        addresses.push(address);
                    }
                    status
                }
                5 if addresses.len() > 8 => (api.free)(any_engine, addresses.remove(0)),
                5 => (api.free)(any_engine, local),
                6 => (api.register_memory)(any_engine, local, length, null_mut()),
                7 => (api.unregister_memory)(any_engine, number(random, &[0])),
                8 | 9 => {
                    let mut opened = TargetHandle::default();
                    let named = (api.name)(any_engine, text.as_mut_ptr(), text.len(), null_mut());
                    let name = if named == 0 { text.as_ptr() } else { c"nobody".as_ptr() };
                    let from = engines[pick(random, engines.len())];
                    let status = (api.open)(from, name, &mut opened);
                    if status == 0 {
                        targets.push(opened);
                    }
                    status
                }
                10 => {
                    let mut blob = vec![0_u8; 64 << 10];
                    let mut size = 0;
                    let to = blob.as_mut_ptr().cast::<c_void>();
                    if (api.export_segment)(any_engine, to, blob.len(), &mut size) == 0 {
                        let at = pick(random, size);
                        if random.random() {
                            blob[at] ^= 1 << random.random_range(0..8);
                        }
                    }
                    let mut opened = TargetHandle::default();
                    let status =
                        (api.import_segment)(any_engine, blob.as_ptr().cast(), size, &mut opened);
                    if status == 0 {
                        targets.push(opened);
                    }
                    status
                }
                11 => (api.refresh)(target),
                12 if targets.len() > 6 => (api.close)(targets.remove(0)),
                12 => (api.close)(target),
                13 | 14 => {
                    let range = RangeEntry { local, remote, len: length };
                    (api.submit_ranges)(target, opcode, &range, 1, options, made_at)
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
                    (api.submit_strided)(target, opcode, &form, 1, options, made_at)
                }
                16 => {
                    let numbers = [0_u32, 1, random.random()];
                    let pages = |address| Pages {
                        address,
                        numbers: numbers.as_ptr(),
                        count: 2,
                        page_stride: 64,
                        layer_stride: length,
                        row_stride: 0,
                    };
                    let form = Paged {
                        local: pages(local),
                        remote: pages(remote),
                        layers: opcode,
                        rows: 1,
                        row_bytes: 64,
                    };
                    (api.submit_paged)(target, opcode, &form, 1, options, made_at)
                }
                17 => {
                    let request = Request {
                        opcode,
                        reserved: 0,
                        source: local,
                        target,
                        offset: remote,
                        length,
                    };
                    let requests = [request; 2];
                    let count = random.random_range(0..3);
                    (api.submit_requests)(any_engine, requests.as_ptr(), count, options, made_at)
                }
                18 | 19 => {
                    let mut found: BatchStatus = std::mem::zeroed();
                    found.struct_size = number(random, &[size_of::<BatchStatus>() as u64]).min(40);
                    (api.wait)(batch, u64::from(random.random::<u8>()), &mut found)
                }
                20 | 21 => (api.release)(batch),
                22 => (api.event_descriptor)(any_engine, &mut 0),
                _ => {
                    let mut found: Statistics = std::mem::zeroed();
                    found.struct_size = size_of::<Statistics>() as u64;
                    (api.statistics)(any_engine, &mut found)
                }
            }
        };
        assert_ne!(status, 12, "a fault of the library's own: {}", last_error());
        statuses[status as usize] += 1;
        if status == 0 && made != BatchHandle::default() {
            batches.push(made);
            if batches.len() > 32 {
                batches.remove(0);
            }
        }
    }
    // They were answers of every kind, and not one refusal ten thousand times.
    assert!(statuses[0] > 1000 && statuses[1] > 100 && statuses[2] > 100, "{statuses:?}");
    for engine in engines {
        // SAFETY: a number.
        assert_eq!(unsafe { (api.destroy)(engine) }, 0);
    }
}
