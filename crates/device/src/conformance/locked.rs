//! Copies over host memory that is page-locked in parts: no driver call may notice the borders.

use std::sync::Arc;

use super::{GUARD, allocate, finish, pattern, queue, read, submit_work, write};
use crate::{CompactCopy, CompactEnd, CopyDescriptor, Device, SliceSource, Work};

/// Bytes of the heap, from the last ones of a page to the first ones of another.
const HEAD: usize = 100;
const TAIL: usize = 50;

/// Where the first `HEAD` of `len` bytes are the last ones of a page.
fn place(heap: &mut [u8]) -> u64 {
    let base = heap.as_mut_ptr().expose_provenance();
    (base.next_multiple_of(rustix::param::page_size()) + rustix::param::page_size() - HEAD) as u64
}

#[doc(hidden)]
pub fn copies_cross_the_pages_that_are_locked_alone(device: Arc<dyn Device>) {
    let page = rustix::param::page_size();
    let len = HEAD + 32 * page + TAIL;
    let mut heap = vec![0; len + 2 * page];
    let host = place(&mut heap);
    let locked = Arc::clone(&device).map_host(host, len as u64).expect("page-locked");
    copies_of_every_kind_arrive(&device, host, locked.addr(), len);
    drop(locked);
}

#[doc(hidden)]
pub fn copies_cross_from_locked_memory_into_its_neighbour(device: Arc<dyn Device>) {
    let page = rustix::param::page_size();
    let lengths = [HEAD + 5 * page, 7 * page, page, TAIL];
    let len = lengths.iter().sum();
    let mut heap = vec![0; len + 2 * page];
    let host = place(&mut heap);
    let mut end = host;
    let locked = lengths.map(|len| {
        let begin = end;
        end += len as u64;
        Arc::clone(&device).map_host(begin, len as u64).expect("page-locked")
    });
    copies_of_every_kind_arrive(&device, host, locked[0].addr(), len);
    drop(locked);
}

/// Between host memory, which the device sees at `seen`, and device memory, both ways.
fn copies_of_every_kind_arrive(device: &Arc<dyn Device>, host: u64, seen: u64, len: usize) {
    let whole = [CopyDescriptor { src: 0, dst: 0, len: len as u64 }];
    copies_arrive(device, (host, seen, len), &whole, None);
    // Of so few bytes that a border lies inside one of them, and backwards, so that none are joined.
    let short: Vec<_> = (0..len as u64 / 96)
        .rev()
        .map(|at| CopyDescriptor { src: 96 * at, dst: 80 * at + 3, len: 64 })
        .collect();
    copies_arrive(device, (host, seen, len), &short, None);
    let end = |row_stride| CompactEnd { row_stride, ..CompactEnd::default() };
    let rows = CompactCopy {
        src: end(96),
        dst: CompactEnd { addr: 3, ..end(80) },
        len: 64,
        rows: short.len() as u32,
        layers: 1,
        pages: 1,
    };
    copies_arrive(device, (host, seen, len), &short, Some(rows));
    bytes_of_the_process_are_written_and_read(device, host, seen, len);
}

/// Copies offsets of the host to offsets of the device, then back, as DMAs and as the kernel does;
/// `rows` stands for the same copies.
fn copies_arrive(
    device: &Arc<dyn Device>,
    (host, seen, len): (u64, u64, usize),
    copies: &[CopyDescriptor],
    rows: Option<CompactCopy<'_>>,
) {
    let processor = crate::host().expect("host memory is always there");
    let memory = allocate(device, len as u64);
    let mut queue = queue(device);
    for (inward, kernel) in [(true, false), (true, true), (false, false), (false, true)] {
        let bytes = pattern(len, 17 + u64::from(kernel));
        let mut expected = vec![GUARD; len];
        let list: Vec<_> = copies
            .iter()
            .map(|&CopyDescriptor { src, dst, len }| {
                let (from, to) = if inward { (src, dst) } else { (dst, src) };
                let bytes = &bytes[from as usize..(from + len) as usize];
                expected[to as usize..(to + len) as usize].copy_from_slice(bytes);
                match inward {
                    true => CopyDescriptor { src: seen + src, dst: memory.addr() + dst, len },
                    false => CopyDescriptor { src: memory.addr() + dst, dst: seen + src, len },
                }
            })
            .collect();
        let rows = rows.map(|rows| {
            let host = CompactEnd { addr: seen + rows.src.addr, ..rows.src };
            let memory = CompactEnd { addr: memory.addr() + rows.dst.addr, ..rows.dst };
            let (src, dst) = if inward { (host, memory) } else { (memory, host) };
            CompactCopy { src, dst, ..rows }
        });
        let (host_bytes, device_bytes) =
            if inward { (&bytes, &vec![GUARD; len]) } else { (&vec![GUARD; len], &bytes) };
        write(&processor, host, host_bytes);
        write(device, memory.addr(), device_bytes);
        let mut nothing = SliceSource(&[]);
        let mut pieces = SliceSource(&list);
        let ticket = submit_work(
            &mut *queue,
            &mut match &rows {
                Some(rows) => Work {
                    compact: std::slice::from_ref(rows),
                    kernel,
                    ..Work::pieces(&mut nothing)
                },
                None if kernel => Work::pieces(&mut pieces),
                None => Work { large: &list, ..Work::pieces(&mut nothing) },
            },
        );
        finish(&mut *queue, ticket);
        let found = match inward {
            true => read(device, memory.addr(), len),
            false => read(&processor, host, len),
        };
        if let Some(at) = (0..len).find(|&at| found[at] != expected[at]) {
            let (copies, rows) = (copies.len(), rows.is_some());
            panic!(
                "byte {at} of {copies} copies, into the device: {inward}, kernel: {kernel}, rows: {rows}: expected {:#04x}, found {:#04x}",
                expected[at], found[at]
            );
        }
    }
}

/// By the calls for set-up and checks: to and from locked memory, and with locked memory as the
/// process's side.
fn bytes_of_the_process_are_written_and_read(
    device: &Arc<dyn Device>,
    host: u64,
    seen: u64,
    len: usize,
) {
    let bytes = pattern(len, 23);
    write(device, seen, &bytes);
    let processor = crate::host().expect("host memory is always there");
    assert!(read(&processor, host, len) == bytes, "locked memory was written");
    assert!(read(device, seen, len) == bytes, "locked memory was read");
    let memory = allocate(device, len as u64);
    let place: *mut u8 = std::ptr::with_exposed_provenance_mut(host as usize);
    // SAFETY: the caller keeps those bytes, which nothing else uses now.
    let locked = unsafe { std::slice::from_raw_parts_mut(place, len) };
    write(device, memory.addr(), locked);
    assert!(read(device, memory.addr(), len) == bytes, "from locked memory");
    locked.fill(GUARD);
    // SAFETY: as `read` of all cases.
    unsafe { device.read(memory.addr(), locked) }.expect("reads");
    assert!(*locked == bytes, "to locked memory");
}
