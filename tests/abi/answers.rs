//! What wrong calls are answered, and that they did nothing.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use kvferry::abi::numbers::{INVALID_ARGUMENT, NOT_FOUND, OK};
use kvferry::abi::types::*;

use super::engines::{api, engine, last_error};

/// An engine of host memory, 4096 bytes of it, and itself as a target.
struct Own {
    engine: EngineHandle,
    target: TargetHandle,
    memory: u64,
}

impl Own {
    fn new() -> Self {
        let (engine, mut target, mut memory) = (engine(), TargetHandle::default(), 0);
        let mut name = [0; 256];
        // SAFETY: all pointers are to what they say.
        unsafe {
            assert_eq!((api().name)(engine, name.as_mut_ptr(), name.len(), null_mut()), OK);
            assert_eq!((api().allocate)(engine, 0, 4096, &mut memory), OK);
            assert_eq!((api().open)(engine, name.as_ptr(), &mut target), OK, "{}", last_error());
        }
        Self { engine, target, memory }
    }

    fn segment(&self) -> Vec<u8> {
        let (mut segment, mut size) = (vec![0_u8; 64 << 10], 0);
        let to = segment.as_mut_ptr().cast::<c_void>();
        // SAFETY: as many bytes as said.
        let status = unsafe { (api().export_segment)(self.engine, to, segment.len(), &mut size) };
        assert_eq!(status, OK, "{}", last_error());
        segment.truncate(size);
        segment
    }

    fn import(&self, segment: &[u8]) -> Status {
        let mut target = TargetHandle::default();
        let from = segment.as_ptr().cast();
        // SAFETY: as many bytes as said.
        unsafe { (api().import_segment)(self.engine, from, segment.len(), &mut target) }
    }

    fn request(&self, opcode: u32, source: u64) -> Request {
        let (target, offset) = (self.target, self.memory + 2048);
        Request { opcode, reserved: 0, source, target, offset, length: 16 }
    }

    fn submit(&self, requests: &[Request]) -> Status {
        let mut batch = BatchHandle::default();
        let (list, count) = (requests.as_ptr(), requests.len());
        // SAFETY: as many entries as said.
        unsafe { (api().submit_requests)(self.engine, list, count, null(), &mut batch) }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: a number.
        unsafe { (api().destroy)(self.engine) };
    }
}

#[test]
fn nothing_is_registered_for_a_caller_with_no_place_for_the_answer() {
    let own = Own::new();
    let memory = [0_u64; 64];
    let mut served = [0_u32; 2];
    let misaligned = served.as_mut_ptr().wrapping_byte_add(1);
    let (at, length) = (memory.as_ptr() as u64, size_of_val(&memory) as u64);
    // SAFETY: the memory outlives the engine; the misaligned pointer is not followed.
    unsafe {
        assert_eq!((api().register_memory)(own.engine, at, length, misaligned), INVALID_ARGUMENT);
        assert_eq!((api().unregister_memory)(own.engine, at), NOT_FOUND, "it was registered");
        assert_eq!((api().register_memory)(own.engine, at, length, null_mut()), OK);
        assert_eq!((api().unregister_memory)(own.engine, at), OK);
    }
    assert_eq!(served, [0; 2]);
}

#[test]
fn a_misaligned_place_for_a_size_is_refused_and_not_written() {
    let own = Own::new();
    let mut needed = [7_usize; 2];
    let misaligned = needed.as_mut_ptr().wrapping_byte_add(1);
    // SAFETY: the misaligned pointer is not followed.
    unsafe {
        assert_eq!((api().name)(own.engine, null_mut(), 0, misaligned), INVALID_ARGUMENT);
        assert_eq!((api().device)(own.engine, 0, null_mut(), 0, misaligned), INVALID_ARGUMENT);
        let exported = (api().export_segment)(own.engine, null_mut(), 0, misaligned);
        assert_eq!(exported, INVALID_ARGUMENT);
    }
    assert_eq!(needed, [7; 2]);
}

#[test]
fn a_segment_that_is_garbage_is_the_callers_mistake() {
    let own = Own::new();
    let whole = own.segment();
    assert_eq!(own.import(&whole), OK, "{}", last_error());
    for wrong in [&b"garbage"[..], b"{}", b"[1]", &whole[..whole.len() / 2], &[0xff; 64]] {
        assert_eq!(own.import(wrong), INVALID_ARGUMENT, "{}", last_error());
    }
}

#[test]
fn the_wrong_entry_of_a_list_is_named_by_its_position() {
    let own = Own::new();
    let good = own.request(1, own.memory);
    let wrong = [
        Request { opcode: 7, ..good },
        Request { reserved: 1, ..good },
        Request { target: TargetHandle { engine: own.engine + 1, ..own.target }, ..good },
    ];
    for (wrong, about) in wrong.into_iter().zip(["opcode", "reserved", "engine"]) {
        assert_eq!(own.submit(&[good, good, wrong, good]), INVALID_ARGUMENT, "{about}");
        let text = last_error();
        assert!(text.starts_with("request 2: ") && text.contains(about), "{text}");
    }

    let pages = |numbers: *const u32| Pages {
        address: own.memory,
        numbers,
        count: 1,
        page_stride: 64,
        layer_stride: 64,
        row_stride: 64,
    };
    let number = 0;
    let form = |local, remote| Paged {
        local: pages(local),
        remote: pages(remote),
        layers: 1,
        rows: 1,
        row_bytes: 16,
    };
    let forms = [form(&number, &number), form(&number, null())];
    let mut batch = BatchHandle::default();
    // SAFETY: two forms, of one number each or of none.
    let status =
        unsafe { (api().submit_paged)(own.target, 1, forms.as_ptr(), 2, null(), &mut batch) };
    assert_eq!(status, INVALID_ARGUMENT);
    assert!(last_error().starts_with("form 1: "), "{}", last_error());
}

/// Requests of one target and opcode become a list of their own, in which errors count.
#[test]
fn a_position_among_requests_of_two_opcodes_says_what_it_counts() {
    let own = Own::new();
    let (write, read) = (own.request(1, own.memory), own.request(0, own.memory + 64));
    let outside = Request { source: 64, ..read };
    assert_eq!(own.submit(&[write, read, outside]), INVALID_ARGUMENT);
    let text = last_error();
    let says = text.contains("range 1:") && text.contains("0x40") && text.contains("one target");
    assert!(says, "{text}");
    assert_eq!(own.submit(&[read, outside]), INVALID_ARGUMENT);
    let text = last_error();
    assert!(text.contains("range 1:") && !text.contains("one target"), "{text}");
}
