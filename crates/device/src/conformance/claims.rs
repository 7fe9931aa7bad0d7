//! Devices that find out whether destinations of a submission overlap.

use std::sync::Arc;

use super::{allocate, finish, submit_work};
use crate::{
    Capabilities, CopyDescriptor, Destinations, Device, Memory, Queue, QueueOptions, SliceSource,
    Ticket, Verdict, Work,
};

const GRANULE: u64 = 32;

/// Pieces of 1 to 40 granules whose destinations are apart, in no order, with gaps here and there.
fn apart(memory: &Memory, pieces: u64) -> Vec<CopyDescriptor> {
    let half = memory.len() / 2;
    let mut at = 0;
    let mut list: Vec<_> = (0..pieces)
        .map(|piece| {
            let (gap, len) = (piece % 3, 1 + piece * 7 % 40);
            let dst = memory.addr() + half + (at + gap) * GRANULE;
            at += gap + len;
            CopyDescriptor { src: memory.addr(), dst, len: len * GRANULE }
        })
        .collect();
    assert!(at * GRANULE <= half);
    // 7919 is prime to every count that is used here.
    let order = |piece: usize| piece * 7919 % pieces as usize;
    list = (0..list.len()).map(|piece| list[order(piece)]).collect();
    list
}

fn destinations(list: &[CopyDescriptor]) -> Destinations {
    Destinations {
        low: list.iter().map(|copy| copy.dst).min().unwrap_or(0),
        high: list.iter().map(|copy| copy.dst + copy.len).max().unwrap_or(0),
        granule: GRANULE,
        bytes: list.iter().map(|copy| copy.len).sum(),
        pieces: list.len() as u64,
        verdict: None,
    }
}

fn submit(queue: &mut dyn Queue, list: &[CopyDescriptor]) -> (Ticket, Option<Verdict>) {
    let mut destinations = destinations(list);
    let mut pieces = SliceSource(list);
    let mut work = Work { destinations: Some(&mut destinations), ..Work::pieces(&mut pieces) };
    (submit_work(queue, &mut work), destinations.verdict)
}

/// What the device says of a list; tables are made at the first need, and clear a little later.
fn verdict(queue: &mut dyn Queue, list: &[CopyDescriptor]) -> Option<u32> {
    for _ in 0..10_000 {
        let (ticket, verdict) = submit(queue, list);
        finish(queue, ticket);
        if let Some(verdict) = verdict {
            return verdict.overlap();
        }
        std::thread::yield_now();
    }
    panic!("no submission was ever looked at");
}

fn open(device: &Arc<dyn Device>) -> Option<Box<dyn Queue>> {
    let has_kernel = device.info().capabilities.contains(Capabilities::KERNEL);
    let options = QueueOptions { ring_slots: 8, slot_descriptors: 1024, ..QueueOptions::default() };
    has_kernel.then(|| Arc::clone(device).queue(&options).expect("a queue"))
}

#[doc(hidden)]
pub fn a_device_finds_the_piece_whose_destination_overlaps_another(device: Arc<dyn Device>) {
    let Some(mut queue) = open(&device) else { return };
    let memory = allocate(&device, 32 << 20);
    for pieces in [5000, 300, 1] {
        let good = apart(&memory, pieces);
        assert_eq!(verdict(&mut *queue, &good), None, "{pieces} pieces");
        if pieces == 1 {
            continue;
        }
        // One granule too many, one too far ahead, the same destination, and all of a longer one.
        let at = pieces as usize / 2;
        let other = good[at + 1];
        for (dst, len) in [
            (other.dst + other.len - GRANULE, GRANULE),
            (other.dst, GRANULE),
            (other.dst, other.len),
            (other.dst, 40 * GRANULE),
        ] {
            let mut bad = good.clone();
            bad[at] = CopyDescriptor { dst, len, ..bad[at] };
            let found = verdict(&mut *queue, &bad).expect("two pieces overlap") as usize;
            let piece = bad.get(found).expect("a piece of the list");
            let others = bad.iter().enumerate().filter(|&(index, _)| index != found);
            let overlaps = |other: &CopyDescriptor| {
                piece.dst < other.dst + other.len && other.dst < piece.dst + piece.len
            };
            assert!(others.map(|(_, other)| other).any(overlaps), "piece {found} is apart");
        }
        assert_eq!(verdict(&mut *queue, &good), None, "the table was not cleared");
    }
}

#[doc(hidden)]
pub fn a_verdict_is_kept_until_it_is_given_back_and_is_missing_where_no_table_is_free(
    device: Arc<dyn Device>,
) {
    let Some(mut queue) = open(&device) else { return };
    let memory = allocate(&device, 32 << 20);
    let good = apart(&memory, 3000);
    let mut bad = good.clone();
    bad[17] = bad[2000];
    let mut kept = Vec::new();
    for _ in 0..1000 {
        let (ticket, verdict) = submit(&mut *queue, &bad);
        finish(&mut *queue, ticket);
        kept.extend(verdict);
    }
    assert!((1..=8).contains(&kept.len()), "{} tables", kept.len());
    for _ in 0..50 {
        let (ticket, verdict) = submit(&mut *queue, &good);
        assert!(verdict.is_none(), "all tables are lent");
        finish(&mut *queue, ticket);
    }
    for verdict in &kept {
        let found = verdict.overlap().expect("pieces 17 and 2000 are the same");
        assert!([17, 2000].contains(&found), "{found}");
    }
    let tables = kept.len();
    kept.clear();
    let (mut tickets, mut lent) = (Vec::new(), Vec::new());
    for _ in 0..2 * tables {
        let (ticket, verdict) = submit(&mut *queue, &good);
        tickets.push(ticket);
        lent.extend(verdict);
    }
    tickets.into_iter().for_each(|ticket| finish(&mut *queue, ticket));
    assert_eq!(lent.len(), tables);
    assert!(lent.iter().all(|verdict| verdict.overlap().is_none()));
}

#[doc(hidden)]
pub fn destinations_that_no_table_holds_are_copied_without_a_verdict(device: Arc<dyn Device>) {
    let Some(mut queue) = open(&device) else { return };
    let memory = allocate(&device, 32 << 20);
    let list = apart(&memory, 1000);
    assert_eq!(verdict(&mut *queue, &list), None);
    let real = destinations(&list);
    for (granule, bytes, pieces, high) in [
        (3, real.bytes, real.pieces, real.high),
        (0, real.bytes, real.pieces, real.high),
        (1 << 63, real.bytes, real.pieces, real.high),
        (GRANULE, u64::MAX, real.pieces, real.high),
        (GRANULE, real.bytes, u64::MAX, real.high),
        (GRANULE, real.bytes, u64::from(u32::MAX), real.high),
        (GRANULE, real.bytes, real.pieces, real.low - 1),
        (GRANULE, real.bytes, real.pieces, u64::MAX),
        (1, 1 << 40, real.pieces, real.high),
    ] {
        let mut destinations = Destinations { granule, bytes, pieces, high, verdict: None, ..real };
        let mut pieces = SliceSource(&list);
        let mut work = Work { destinations: Some(&mut destinations), ..Work::pieces(&mut pieces) };
        let ticket = submit_work(&mut *queue, &mut work);
        assert!(destinations.verdict.is_none(), "{destinations:?}");
        finish(&mut *queue, ticket);
    }
}
