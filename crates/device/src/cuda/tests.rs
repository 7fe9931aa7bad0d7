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
