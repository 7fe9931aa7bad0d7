//! Memory: what is written stays, what is allocated is found, exported and refused as it should be.

use std::sync::Arc;

use super::{allocate, finish, pattern, queue, read, submit, write};
use crate::{CopyDescriptor, Device, Error, Export, SliceSource};

#[doc(hidden)]
pub fn memory_keeps_what_was_written(device: Arc<dyn Device>) {
    let memory = allocate(&device, 100_003);
    let bytes = pattern(100_003, 1);
    write(&device, memory.addr(), &bytes);
    assert!(memory.addr().is_multiple_of(256));
    assert_eq!(read(&device, memory.addr(), 100_003), bytes);
    write(&device, memory.addr() + 7, &[1, 2, 3]);
    assert_eq!(read(&device, memory.addr() + 6, 5), [bytes[6], 1, 2, 3, bytes[10]]);
}

#[doc(hidden)]
pub fn an_allocation_is_found_from_any_address_inside_it(device: Arc<dyn Device>) {
    let memory = allocate(&device, 4 << 20);
    let whole = device.allocation(memory.addr()).expect("found");
    assert_eq!(whole.base, memory.addr());
    assert!(whole.len >= memory.len());
    for offset in [1, 63, 4096, (4 << 20) - 1] {
        assert_eq!(device.allocation(memory.addr() + offset), Ok(whole), "offset {offset}");
    }
    for stranger in [0, 8, u64::MAX] {
        assert!(
            matches!(device.allocation(stranger), Err(Error::UnknownAddress { .. })),
            "{stranger:#x}"
        );
    }
}

#[doc(hidden)]
pub fn a_new_allocation_never_has_the_number_of_an_old_one(device: Arc<dyn Device>) {
    let mut seen = std::collections::HashSet::new();
    for round in 0..20u64 {
        let memory = allocate(&device, (round % 3 + 1) << 20);
        let id = device.allocation(memory.addr()).expect("found").id;
        assert!(seen.insert(id), "round {round}: number {id} came again");
    }
}

#[doc(hidden)]
pub fn impossible_sizes_are_refused(device: Arc<dyn Device>) {
    for bytes in [0, u64::MAX, 1 << 63] {
        let refused = Arc::clone(&device).allocate(bytes).map(|_| ());
        assert!(matches!(refused, Err(Error::BadSize { .. })), "{bytes}: {refused:?}");
    }
    let refused = Arc::clone(&device).allocate(1 << 60).map(|_| ());
    assert!(matches!(refused, Err(Error::OutOfMemory { .. } | Error::Call { .. })), "{refused:?}");
    // And the device still works.
    memory_keeps_what_was_written(device);
}

#[doc(hidden)]
pub fn an_export_is_not_opened_by_the_process_that_made_it_or_is_the_same_memory(
    device: Arc<dyn Device>,
) {
    let memory = allocate(&device, 1 << 20);
    write(&device, memory.addr(), &pattern(1000, 3));
    let allocation = device.allocation(memory.addr()).expect("found");
    let export = device.export(&allocation).expect("exports");
    assert_eq!(export.len(), allocation.len);
    match Arc::clone(&device).open(export) {
        Err(Error::SameProcess { .. }) => {}
        Ok(mapping) => assert_eq!(read(&device, mapping.addr(), 1000), pattern(1000, 3)),
        Err(error) => panic!("{error}"),
    }
}

#[doc(hidden)]
pub fn a_stale_allocation_is_not_exported(device: Arc<dyn Device>) {
    let memory = allocate(&device, 1 << 20);
    let stale = device.allocation(memory.addr()).expect("found");
    drop(memory);
    assert!(device.export(&stale).is_err());
    let again = allocate(&device, 1 << 20);
    if device.allocation(again.addr()).is_ok_and(|now| now.base == stale.base) {
        assert!(device.export(&stale).is_err(), "an old allocation was exported as a new one");
    }
}

#[doc(hidden)]
pub fn garbage_is_not_opened_as_an_export(device: Arc<dyn Device>) {
    for bytes in [vec![], vec![0; 1], vec![0xff; 64], vec![0; 80], vec![7; 4096]] {
        let opened = Arc::clone(&device).open(Export::Handle { bytes, len: 4096 }).map(|_| ());
        assert!(matches!(opened, Err(Error::BadExport { .. } | Error::Call { .. })), "{opened:?}");
    }
    let file = std::fs::File::open("/dev/null").expect("always there");
    assert!(Arc::clone(&device).open(Export::File { fd: file.into(), len: 1 << 20 }).is_err());
    let file = std::fs::File::open("/dev/null").expect("always there");
    assert!(Arc::clone(&device).open(Export::File { fd: file.into(), len: 0 }).is_err());
    memory_keeps_what_was_written(device);
}

#[doc(hidden)]
pub fn pinned_memory_is_seen_by_the_processor_and_the_device(device: Arc<dyn Device>) {
    let mut queue = queue(&device);
    let mut pinned = Arc::clone(&device).allocate_pinned(100_000).expect("pinned memory");
    assert_eq!((pinned.len(), pinned.bytes().len()), (100_000, 100_000));
    assert!(pinned.bytes().iter().all(|&byte| byte == 0));
    let memory = allocate(&device, 100_000);
    for (at, byte) in pinned.bytes_mut().iter_mut().enumerate() {
        *byte = at as u8;
    }
    let expected = pinned.bytes().to_vec();
    let (host, there, len) = (pinned.addr(), memory.addr(), 100_000);
    for (src, dst) in [(host, there), (there, host)] {
        let ticket =
            submit(&mut *queue, &mut SliceSource(&[]), &[CopyDescriptor { src, dst, len }]);
        finish(&mut *queue, ticket);
        if dst == there {
            assert_eq!(read(&device, there, 100_000), expected);
            pinned.bytes_mut().fill(0);
        }
    }
    assert_eq!(pinned.bytes(), expected);
    assert!(Arc::clone(&device).allocate_pinned(0).is_err());
}
