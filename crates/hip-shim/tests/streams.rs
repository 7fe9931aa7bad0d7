//! Streams, events, captures and failures of the simulated GPU.

mod common;

use std::ptr::null_mut;

use common::Hip;
use hip_sys::*;

const LEN: usize = 1 << 16;

#[test]
fn work_runs_in_order_and_not_before_the_stream_comes_to_it() {
    let hip = Hip::load();
    let stream = hip.stream(hipStreamNonBlocking);
    let gate = hip.gate();
    let (first, second) = (hip.allocate(LEN), hip.allocate(LEN));
    gate.hold(stream);
    hip.fill(first, 7, LEN, stream);
    hip.copy(second, first, LEN, stream);
    hip.fill(first, 9, LEN, stream);
    let end = hip.record(stream);
    assert_eq!(hip.query(end), hipErrorNotReady);
    assert_eq!(hip.bytes(first, LEN), vec![0; LEN], "it ran before its turn");
    gate.open();
    hip.wait(end);
    assert_eq!(hip.bytes(second, LEN), vec![7; LEN]);
    assert_eq!(hip.bytes(first, LEN), vec![9; LEN]);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_and_they_for_it_but_others_do_not() {
    let hip = Hip::load();
    let (blocking, free) = (hip.stream(hipStreamDefault), hip.stream(hipStreamNonBlocking));
    let gate = hip.gate();
    gate.hold(blocking);
    let behind = hip.record(null_mut());
    let behind_that = hip.record(hip.stream(hipStreamDefault));
    let beside = hip.record(free);
    hip.wait(beside);
    assert_eq!(hip.query(behind), hipErrorNotReady);
    assert_eq!(hip.query(behind_that), hipErrorNotReady);
    gate.open();
    hip.wait(behind);
    hip.wait(behind_that);
}

#[test]
fn a_stream_waits_for_an_event_as_it_was_recorded_though_it_is_recorded_again() {
    let hip = Hip::load();
    let [slow, waiting, quick] = [(); 3].map(|()| hip.stream(hipStreamNonBlocking));
    let gate = hip.gate();
    gate.hold(slow);
    let event = hip.record(slow);
    // SAFETY: all of them live.
    unsafe {
        assert_eq!(hip.library.hipStreamWaitEvent(waiting, event, 0), hipSuccess);
        assert_eq!(hip.library.hipEventRecord(event, quick), hipSuccess);
    }
    let end = hip.record(waiting);
    hip.wait(hip.record(quick));
    assert_eq!(hip.query(end), hipErrorNotReady);
    gate.open();
    hip.wait(end);
}

#[test]
fn a_word_is_written_when_the_stream_comes_to_it() {
    let hip = Hip::load();
    let stream = hip.stream(hipStreamNonBlocking);
    let gate = hip.gate();
    let mut word = null_mut();
    // SAFETY: the library writes one address.
    assert_eq!(unsafe { hip.library.hipHostMalloc(&mut word, 4, 0) }, hipSuccess);
    gate.hold(stream);
    // SAFETY: the word lives.
    let stored = unsafe { hip.library.hipStreamWriteValue32(stream, word, 0x0102_0304, 0) };
    assert_eq!(stored, hipSuccess);
    assert_eq!(hip.bytes(word, 4), [0; 4]);
    gate.open();
    hip.wait(hip.record(stream));
    assert_eq!(hip.bytes(word, 4), [4, 3, 2, 1]);
    let mut unknown = 0_u32;
    let place = (&raw mut unknown).cast();
    // SAFETY: refused.
    let refused = unsafe { hip.library.hipStreamWriteValue32(stream, place, 1, 0) };
    assert_eq!(refused, hipErrorInvalidValue, "a word that the library does not know");
}

#[test]
fn an_allocation_beside_a_capture_breaks_it_unless_the_thread_is_relaxed() {
    let hip = Hip::load();
    let stream = hip.stream(hipStreamDefault);
    let captured = |work: &dyn Fn()| {
        let mut graph = null_mut();
        // SAFETY: the stream lives; the library writes one graph.
        unsafe {
            let begun = hip.library.hipStreamBeginCapture(stream, hipStreamCaptureModeGlobal);
            assert_eq!(begun, hipSuccess);
            work();
            hip.library.hipStreamEndCapture(stream, &mut graph)
        }
    };
    let allocate = || {
        let mut addr = null_mut();
        // SAFETY: the library writes one address.
        unsafe { hip.library.hipMalloc(&mut addr, 64) }
    };
    let relaxed = |work: &dyn Fn()| {
        let mut mode = hipStreamCaptureModeRelaxed;
        // SAFETY: one mode, read and written.
        unsafe { hip.library.hipThreadExchangeStreamCaptureMode(&mut mode) };
        work();
        // SAFETY: as above.
        unsafe { hip.library.hipThreadExchangeStreamCaptureMode(&mut mode) };
    };
    let memory = hip.allocate(LEN);
    assert_eq!(captured(&|| hip.fill(memory, 1, LEN, stream)), hipSuccess);
    assert_eq!(hip.bytes(memory, LEN), vec![0; LEN], "what is captured does not run");
    assert_eq!(captured(&|| relaxed(&|| assert_eq!(allocate(), hipSuccess))), hipSuccess);
    let refused = || assert_eq!(allocate(), hipErrorStreamCaptureUnsupported);
    assert_eq!(captured(&refused), hipErrorStreamCaptureInvalidated);
    let event = || {
        let event = hip.record(stream);
        assert_eq!(hip.query(event), hipErrorCapturedEvent);
    };
    assert_eq!(captured(&event), hipErrorStreamCaptureInvalidated);
    assert_eq!(captured(&|| {}), hipSuccess, "nothing is left of it");
}

#[test]
fn a_call_fails_when_it_is_told_to_and_leaves_its_error_to_the_thread() {
    let hip = Hip::load();
    hip.fail("hipMalloc:2=2,hipEventQuery:1+=719");
    let allocate = || {
        let mut addr = null_mut();
        // SAFETY: the library writes one address.
        unsafe { hip.library.hipMalloc(&mut addr, 64) }
    };
    assert_eq!([allocate(), allocate(), allocate()], [0, 2, 0]);
    assert_eq!(hip.last_error(), 2, "a later success does not hide it");
    assert_eq!(hip.last_error(), 0);
    let event = hip.record(hip.stream(hipStreamNonBlocking));
    assert_eq!([hip.query(event), hip.query(event)], [719, 719]);
    hip.fail("");
    hip.wait(event);
    assert_eq!(hip.query(event), 0);
    let other = std::thread::scope(|scope| {
        let library = &hip.library;
        // SAFETY: always allowed.
        scope.spawn(|| unsafe { library.hipGetLastError() }).join().expect("no panic")
    });
    assert_eq!(other, 0, "of another thread");
    assert_eq!(hip.last_error(), 719);
}

#[test]
fn a_lost_device_ends_every_wait_and_runs_nothing_more() {
    let hip = Hip::load();
    let stream = hip.stream(hipStreamNonBlocking);
    let (gate, memory) = (hip.gate(), hip.allocate(LEN));
    gate.hold(stream);
    hip.fill(memory, 1, LEN, stream);
    let end = hip.record(stream);
    std::thread::scope(|scope| {
        let library = &hip.library;
        let handle = end.expose_provenance();
        let waiting = scope.spawn(move || {
            let end = std::ptr::with_exposed_provenance_mut(handle);
            // SAFETY: the event lives.
            unsafe { library.hipEventSynchronize(end) }
        });
        hip.fail("lost:hipEventQuery:1=719");
        assert_eq!(hip.query(end), 719);
        assert_eq!(waiting.join().expect("no panic"), 719);
    });
    gate.open();
    hip.fail("hipFree:1000=1");
    assert_eq!(hip.query(end), 719, "it stays lost");
    assert_eq!(hip.bytes(memory, LEN), vec![0; LEN]);
}
