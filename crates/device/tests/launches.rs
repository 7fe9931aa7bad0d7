//! What a submission asks of the driver, counted on the simulated GPU.

use std::sync::Arc;

use kvferry_device::sim::{SimOptions, sim};
use kvferry_device::{CopyDescriptor, QueueOptions, SliceSource, Work};

#[test]
fn a_short_list_is_one_launch_and_one_event_and_a_longer_one_begins_with_a_short_launch() {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let memory = Arc::clone(&device).allocate(1 << 20).expect("memory");
    let options = QueueOptions::default();
    let (first, slot) = (options.first_descriptors, options.slot_descriptors);
    let mut queue = Arc::clone(&device).queue(&options).expect("a queue");
    let completions = queue.completions();
    for (pieces, launches) in [
        (200, 1),
        (first, 1),
        (2 * first, 1),
        (2 * first + 1, 2),
        (first + slot, 2),
        (first + slot + 1, 3),
    ] {
        let piece = |at| {
            let at = memory.addr() + at as u64 * 16;
            CopyDescriptor { src: at, dst: at + (1 << 19), len: 16 }
        };
        let list: Vec<_> = (0..pieces).map(piece).collect();
        let before = ["launch", "record"].map(|call| control.calls(call));
        let mut source = SliceSource(&list);
        // SAFETY: the memory is twice as long as the list needs and outlives the queue.
        let ticket = unsafe { queue.submit(&mut Work::pieces(&mut source)) }.expect("submits");
        while !completions.done(ticket) {
            queue.check().expect("the device works");
        }
        let made = ["launch", "record"].map(|call| control.calls(call));
        assert_eq!(made[0] - before[0], launches, "{pieces} pieces");
        if launches == 1 {
            assert_eq!(made[1] - before[1], 1, "{pieces} pieces: the end");
        }
    }
}
