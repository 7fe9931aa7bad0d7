#[cfg(feature = "testing")]
mod last_error;
#[cfg(feature = "testing")]
mod spinning;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::*;

/// The device, or a line that says why the test is skipped.
fn first_device() -> Option<Arc<dyn Device>> {
    match count().and_then(|_| open(0, &CudaOptions::default())) {
        Ok(device) => Some(device),
        Err(error) => {
            crate::conformance::skip("cuda", &error);
            None
        }
    }
}

/// Runs a test of this module, named by its path from here, as the only one of a new process: the
/// GPU's hardware queues and the process's contexts are its own, and if it hangs it is ended.
fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "KVFERRY_TEST_ALONE";
    const LIMIT: Duration = Duration::from_secs(120);
    if std::env::var(ALONE).is_ok_and(|name| name == test) {
        return body();
    }
    let mut child = Command::new(std::env::current_exe().expect("this binary"))
        .args([&format!("cuda::tests::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, test)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it can be started");
    let start = Instant::now();
    while child.try_wait().expect("our own child").is_none() {
        if start.elapsed() > LIMIT {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().expect("it has ended");
    let said = String::from_utf8_lossy(&output.stdout);
    // Zero tests would be a success, too.
    assert!(output.status.success() && said.contains("1 passed"), "{}: {said}", output.status);
}

#[test]
fn a_machine_without_a_gpu_gives_an_error_and_no_panic() {
    for result in [count().map(drop), open(0, &CudaOptions::default()).map(drop)] {
        if let Err(error) = result {
            assert!(
                matches!(
                    error,
                    Error::LibraryMissing { .. }
                        | Error::SymbolMissing { .. }
                        | Error::NoDevice { .. }
                ),
                "{error}"
            );
        }
    }
}

#[test]
fn an_ordinal_out_of_range_says_how_many_there_are() {
    for ordinal in [count().unwrap_or(0), 1 << 31, u32::MAX] {
        let error = open(ordinal, &CudaOptions::default()).expect_err("there are fewer");
        if let Ok(count) = count() {
            assert!(matches!(error, Error::NoDevice { .. }), "{error}");
            assert!(error.to_string().contains(&format!("sees {count}")), "{error}");
        }
    }
}

#[test]
fn a_thread_without_a_context_has_none_after_every_call() {
    // SAFETY: the signature is that of cuda.h; the call only writes one pointer.
    let current = || unsafe {
        type CtxGetCurrent = unsafe extern "C" fn(*mut sys::CUcontext) -> c_int;
        let mut current = std::ptr::null_mut();
        let get =
            sys::culib().get::<CtxGetCurrent>(b"cuCtxGetCurrent").expect("every libcuda has it");
        assert_eq!(get(&mut current), 0);
        current
    };
    let Some(device) = first_device() else { return };
    assert!(current().is_null(), "after open");
    let memory = Arc::clone(&device).allocate(1 << 20).expect("a megabyte is free");
    assert!(current().is_null(), "after allocate");
    let allocation = device.allocation(memory.addr() + 4096).expect("an address inside");
    assert_eq!((allocation.base, allocation.len), (memory.addr(), memory.len()));
    let export = device.export(&allocation).expect("cuMemAlloc memory has a handle");
    assert_eq!(export.len(), 1 << 20);
    let error = Arc::clone(&device).open(export).expect_err("our own export");
    assert!(matches!(error, Error::SameProcess { .. }), "{error}");
    let on_the_stack = 0_u64;
    let error = device.allocation((&raw const on_the_stack) as u64).expect_err("not device memory");
    assert!(matches!(error, Error::UnknownAddress { .. }), "{error}");
    let forged = Export::Handle { bytes: vec![0; 80], len: 1 << 20 };
    let error = Arc::clone(&device).open(forged).expect_err("no such handle");
    assert!(matches!(error, Error::BadExport { .. }), "{error}");
    assert!(current().is_null(), "after failed calls");
    let mut read = vec![0; 1 << 20];
    let written: Vec<u8> =
        (0..1 << 20).map(|index: u32| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    // SAFETY: the memory is ours alone and a megabyte long.
    unsafe { device.write(memory.addr(), &written) }.expect("write");
    // SAFETY: as above.
    unsafe { device.read(memory.addr(), &mut read) }.expect("read");
    assert!(read == written);
    drop((memory, device));
    assert!(current().is_null(), "after drop");
}

#[cfg(feature = "testing")]
mod memory {
    use super::super::testing::{allocate_from_pool, map_chunks};
    use super::*;
    use crate::testing::ChunkKind::{Hole, Private, Shareable};
    use crate::testing::ChunkedMemory;

    #[test]
    fn the_unit_of_a_range_is_the_run_of_chunks_that_it_touches_up_to_a_hole() {
        let Some(device) = first_device() else { return };
        // The last hole keeps what another test maps from being the next chunk.
        let memory = map_chunks(0, &[Shareable, Shareable, Shareable, Hole, Shareable, Hole]);
        let chunk = memory.chunk_len();
        let unit = |offset, len| {
            let unit = device.export_unit(memory.addr() + offset, len).expect("it is mapped");
            (unit.base - memory.addr(), unit.len / chunk)
        };
        assert_eq!(unit(0, 1), (0, 1));
        assert_eq!(unit(chunk - 1, 2), (0, 2));
        assert_eq!(unit(chunk + 5, chunk), (chunk, 2));
        assert_eq!(unit(0, 5 * chunk), (0, 3));
        assert_eq!(unit(4 * chunk, 2 * chunk), (4 * chunk, 1));
        let hole = memory.addr() + 3 * chunk;
        let refused = device.export_unit(hole, 1).expect_err("nothing is there");
        assert!(matches!(refused, Error::UnknownAddress { .. }), "{refused}");
    }

    #[test]
    fn a_units_number_never_comes_again_when_any_of_its_chunks_was_replaced() {
        let Some(device) = first_device() else { return };
        let mut memory = map_chunks(0, &[Shareable; 3]);
        let (addr, len) = (memory.addr(), memory.len());
        let mut seen = std::collections::HashSet::new();
        for round in 0..60 {
            let unit = device.export_unit(addr, len).expect("it is mapped");
            assert_eq!(device.export_unit(addr + 7, len - 7), Ok(unit), "the same chunks");
            assert!(seen.insert(unit.id), "round {round}: number {} came again", unit.id);
            memory.replace(round % 3, Shareable);
            device.export(&unit).expect_err("a chunk was replaced");
        }
    }

    #[test]
    fn memory_that_cannot_be_shared_is_refused_with_the_remedy() {
        let Some(device) = first_device() else { return };
        let refusal = |addr, len| {
            let unit = device.export_unit(addr, len).expect("it is mapped");
            let refused = device.prepare_export(&unit).map(|_| ()).expect_err("not shareable");
            assert!(matches!(refused, Error::NotExportable { .. }), "{refused}");
            assert!(device.export(&unit).is_err());
            refused.to_string()
        };
        let memory = map_chunks(0, &[Shareable, Private]);
        let reason = refusal(memory.addr(), memory.len());
        assert!(reason.contains("expandable_segments:False"), "{reason}");
        let pooled = allocate_from_pool(0, 1 << 20, false);
        let reason = refusal(pooled.addr(), 1 << 20);
        assert!(reason.contains("stream-ordered pool"), "{reason}");
    }

    #[test]
    fn chunks_and_shared_pools_are_exported_and_garbage_in_their_place_is_refused() {
        let Some(device) = first_device() else { return };
        let memory = map_chunks(0, &[Shareable; 3]);
        let unit = device.export_unit(memory.addr(), memory.len()).expect("it is mapped");
        assert!(device.prepare_export(&unit).expect("it may be shared").is_none());
        let Export::Chunks { mut chunks, len } = device.export(&unit).expect("exports") else {
            panic!("it has chunks")
        };
        assert_eq!((chunks.len(), len), (3, memory.len()));
        let null = || std::fs::File::open("/dev/null").expect("always there").into();
        chunks[2].fd = null();
        let error = Arc::clone(&device)
            .open(Export::Chunks { chunks, len })
            .expect_err("the last one is no memory");
        assert!(matches!(error, Error::BadExport { .. } | Error::Call { .. }), "{error}");

        let pooled = allocate_from_pool(0, 1 << 20, true);
        let unit = device.export_unit(pooled.addr() + 5, 100).expect("found");
        assert_eq!((unit.base, unit.len), (pooled.addr(), 1 << 20));
        assert!(device.prepare_export(&unit).expect("it may be shared").is_none());
        let export = device.export(&unit).expect("exports");
        let Export::Pool { bytes, len, .. } = &export else { panic!("it is of a pool") };
        assert_eq!((bytes.len(), *len), (80, 1 << 20));
        let mut forged = bytes.clone();
        forged[0] ^= 1;
        let error = Arc::clone(&device).open(export).expect_err("our own export");
        assert!(matches!(error, Error::SameProcess { .. }), "{error}");
        let forged = Export::Pool { fd: null(), bytes: forged, len: 1 << 20 };
        let error = Arc::clone(&device).open(forged).expect_err("no pool");
        assert!(matches!(error, Error::BadExport { .. } | Error::Call { .. }), "{error}");
    }

    #[test]
    fn host_memory_is_used_in_place_and_let_go_with_its_last_user() {
        let Some(device) = first_device() else { return };
        let host = crate::host().expect("always there");
        assert!(device.reaches(&host.info().uuid));
        let memory = Arc::clone(&host).allocate(100_003).expect("memory");
        let whole = host.export_unit(memory.addr(), memory.len()).expect("found");
        let text = b"kept in place";
        for _ in 0..3 {
            let first = Arc::clone(&device).map_host(memory.addr(), memory.len()).expect("maps");
            let second = Arc::clone(&device).map_host(memory.addr(), memory.len()).expect("shares");
            assert_eq!(second.addr(), first.addr());
            drop(first);
            // SAFETY: inside the memory, which nobody else uses; the second mapping keeps it.
            unsafe { device.write(second.addr() + 5000, text) }.expect("writes");
            drop(second);
            // What another process would open.
            let opened = Arc::clone(&device).open(host.export(&whole).expect("exports"));
            let opened = opened.expect("opens");
            let mut read = [0; 13];
            // SAFETY: inside the mapping, which nobody writes now.
            unsafe { device.read(opened.addr() + 5000, &mut read) }.expect("reads");
            assert_eq!(&read, text);
        }
        let all = Arc::clone(&device).map_host(memory.addr(), 8192).expect("maps");
        let refused = Arc::clone(&device).map_host(memory.addr() + 4096, 8192).map(|_| ());
        assert!(matches!(refused, Err(Error::Call { .. })), "half of it is locked: {refused:?}");
        drop(all);
        let nothing = Arc::clone(&device).map_host(1 << 46, 4096).map(|_| ());
        assert!(nothing.is_err(), "nothing is mapped there");
    }

    #[test]
    fn every_gpu_that_reaches_the_chunks_maps_them_whole_and_lets_go() {
        let Some(owner) = first_device() else { return };
        let memory = map_chunks(0, &[Shareable; 5]);
        let (addr, len) = (memory.addr(), memory.len());
        let unit = owner.export_unit(addr, len).expect("it is mapped");
        let bytes: Vec<u8> =
            (0..len).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect();
        // SAFETY: all of the memory, which is ours alone.
        unsafe { owner.write(addr, &bytes) }.expect("writes");
        for ordinal in 0..count().expect("counted before") {
            let device = open(ordinal, &CudaOptions::default()).expect("it is there");
            if !device.reaches(&owner.info().uuid) {
                crate::conformance::skip("peer access", &format_args!("cuda:{ordinal} to cuda:0"));
                continue;
            }
            for round in 0..50_u8 {
                let export = owner.export(&unit).expect("exports");
                let mapping = Arc::clone(&device).open(export).expect("opens");
                let mut found = vec![0; len as usize];
                // SAFETY: all of the mapping, which nobody writes now.
                unsafe { device.read(mapping.addr(), &mut found) }.expect("reads");
                assert!(found == bytes, "cuda:{ordinal}, round {round}");
                let border = memory.chunk_len() - 2;
                // SAFETY: inside the mapping, which nobody else uses now.
                unsafe { device.write(mapping.addr() + border, &[round; 4]) }.expect("writes");
                let mut seen = [0; 4];
                // SAFETY: inside the memory, which nobody writes now.
                unsafe { owner.read(addr + border, &mut seen) }.expect("reads");
                assert_eq!(seen, [round; 4], "cuda:{ordinal}");
                // SAFETY: as the first write.
                unsafe { owner.write(addr, &bytes) }.expect("writes");
            }
        }
    }
}
