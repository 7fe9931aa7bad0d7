//! The order with an application's own streams.

use kvferry_device::Error as DeviceError;
use kvferry_device::conformance::ApplicationStream;
use kvferry_engine::{Consumer, Error, Producer, State, StoreError};

use crate::bench::{Bench, Kind, MOMENT, PATIENCE, done, key, options, shape};

/// The stream fills a row of a page with a byte.
fn write_row(bench: &Bench, stream: &dyn ApplicationStream, page: u32, byte: u8) {
    let addr = bench.memory.addr() + bench.rows(page).next().expect("a layer").1;
    // SAFETY: inside the bench's memory; what else uses the page is ordered with the stream.
    unsafe { stream.fill(addr, byte, bench.shape.page_bytes) };
}

fn first_row(bench: &Bench, page: u32) -> Vec<u8> {
    let mut found = vec![0; bench.shape.page_bytes as usize];
    bench.memory.read(bench.rows(page).next().expect("a layer").1, &mut found).expect("inside");
    found
}

pub(crate) fn b21_a_page_out_waits_for_its_producer_and_stores_what_it_wrote(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 16));
    let stream = bench.stream();
    for (round, by_event) in [false, true].into_iter().enumerate() {
        bench.fill_all(|_| 0);
        stream.hold();
        write_row(&bench, &*stream, 5, 0xAB);
        let handle = if by_event { stream.record() } else { stream.handle() };
        // SAFETY: both live as long as the stream.
        let after =
            unsafe { if by_event { Producer::event(handle) } else { Producer::stream(handle) } };
        let name = key(round as u64);
        let out = store.page_out(&[(5, name)], Some(after)).expect("goes out");
        // Both are behind the page-out, and so behind the producer.
        store.clear(&[5], None).expect("clears");
        let back = store.page_in(&[(name, 6)], None).expect("comes in");
        assert_eq!(store.wait(&back, MOMENT), Ok(State::Running));
        assert_eq!(store.poll(&out), Ok(State::Running));
        assert!(matches!(store.drain(MOMENT), Err(StoreError::Busy { operations: 3, .. })));
        stream.open();
        done(&store, &back);
        store.drain(PATIENCE).expect("all well");
        assert_eq!(first_row(&bench, 6), vec![0xAB; 4096]);
        bench.check(5, 0);
    }
}

pub(crate) fn a_stream_waits_for_a_page_in_and_the_host_does_not(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 16));
    let (gate, model) = (bench.stream(), bench.stream());
    bench.fill_all(|page| u64::from(page) + 1);
    store.page_out(&[(5, key(5))], None).expect("goes out");
    store.drain(PATIENCE).expect("all well");
    gate.hold();
    // SAFETY: the streams outlive the calls.
    let (after, consumer) =
        unsafe { (Producer::stream(gate.handle()), Consumer::stream(model.handle())) };
    let batch = store.page_in(&[(key(5), 6)], Some(after)).expect("comes in");
    store.signal(&batch, consumer).expect("signals");
    // The model's stream overwrites a row of what comes in.
    write_row(&bench, &*model, 6, 0xCD);
    let event = model.record();
    // What waits for nobody has passed.
    let other = store.page_in(&[(key(5), 7)], None).expect("comes in");
    done(&store, &other);
    assert!(!model.has_fired(event), "the model's stream did not wait");
    gate.open();
    while !model.has_fired(event) {
        std::thread::yield_now();
    }
    assert_eq!(store.poll(&batch), Ok(State::Completed));
    assert_eq!(first_row(&bench, 6), vec![0xCD; 4096]);
    // One that has ended is not waited for.
    store.signal(&batch, consumer).expect("signals");
}

pub(crate) fn a_stream_waits_for_a_page_out_before_it_writes_the_page(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 16));
    let (gate, model) = (bench.stream(), bench.stream());
    bench.fill_all(|_| 0);
    gate.hold();
    // SAFETY: as above.
    let (after, consumer) =
        unsafe { (Producer::stream(gate.handle()), Consumer::stream(model.handle())) };
    let batch = store.page_out(&[(5, key(5))], Some(after)).expect("goes out");
    store.signal(&batch, consumer).expect("signals");
    write_row(&bench, &*model, 5, 0xEF);
    gate.open();
    let batch = store.page_in(&[(key(5), 6)], None).expect("comes in");
    done(&store, &batch);
    bench.check(6, 0);
}

pub(crate) fn operations_beside_a_capture_leave_its_graph_valid(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let stream = bench.stream();
    bench.fill_all(|page| u64::from(page) + 1);
    stream.begin_capture();
    let store = bench.store(options(&bench, 16));
    store.page_out(&[(5, key(5)), (6, key(6))], None).expect("goes out");
    store.clear(&[5, 6], None).expect("clears");
    let batch = store.page_in(&[(key(5), 6)], None).expect("comes in");
    done(&store, &batch);
    // SAFETY: the stream outlives the calls.
    let (producer, consumer) =
        unsafe { (Producer::stream(stream.handle()), Consumer::stream(stream.handle())) };
    // What would become a part of the graph is refused.
    for refused in [
        store.signal(&store.clear(&[1], None).expect("clears"), consumer).err(),
        store.page_out(&[(7, key(7))], Some(producer)).err(),
    ] {
        assert!(
            matches!(
                refused,
                None | Some(StoreError::Engine(Error::Device(DeviceError::NotOrderable { .. })))
            ),
            "{refused:?}"
        );
    }
    store.drain(PATIENCE).expect("all well");
    drop(store);
    assert!(stream.end_capture(), "the graph is not valid");
    bench.check(6, 6);
}
