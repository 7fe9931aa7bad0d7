use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::*;
use crate::config::Config;
use crate::engine::Engine;
use crate::segment::{NoExports, SegmentRegion};

/// A target, and its segments: all of it can be mapped, or nothing.
fn opened() -> (Target, impl Fn(bool) -> Segment + Clone + Send + Sync + 'static) {
    let host = kvferry_device::host().expect("always there");
    let vendor = host.info().vendor;
    let (incarnation, process) = (Identity::random(), Identity::random());
    let key = AllocationKey { device: host.info().uuid, id: 1 };
    let segment = move |mappable| Segment {
        incarnation,
        process,
        pid: 1,
        allocations: vec![SegmentAllocation { key, vendor, base: 4096, len: 4096, mappable }],
        regions: vec![SegmentRegion { addr: 4096, len: 64, allocation: key, segment: None }],
    };
    let engine = Engine::new(Config::default(), vec![host]).expect("an engine");
    let target = engine.open("peer", segment(false), Arc::new(NoExports)).expect("opens");
    (target, segment)
}

#[test]
fn whoever_sees_a_newer_segment_knows_that_some_of_it_cannot_be_mapped() {
    let (target, segment) = opened();
    for _ in 0..2000 {
        target.refresh(segment(true)).expect("the same engine's");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !target.table().is_private(0) {
                    std::hint::spin_loop();
                }
                target.is_near()
            });
            target.refresh(segment(false)).expect("as at the beginning");
            assert!(!reader.join().expect("no panic"));
        });
    }
}

#[test]
fn whoever_sees_a_newer_segment_sees_that_it_is_counted() {
    let (target, segment) = opened();
    let over = AtomicBool::new(false);
    // What can be mapped changes with each refresh, so the count says what there is to be seen.
    let look = || {
        while !over.load(Ordering::Relaxed) {
            let before = target.changes();
            let is_private = target.table().is_private(0);
            if target.changes() == before {
                assert_eq!(is_private, before.is_multiple_of(2), "{before}");
            }
        }
    };
    std::thread::scope(|scope| {
        let readers = [(); 3].map(|()| scope.spawn(look));
        for round in 0..100_000 {
            target.refresh(segment(round % 2 == 0)).expect("the same engine's");
        }
        over.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().expect("it is counted"));
    });
    assert_eq!(target.changes(), 100_000);
}

/// Takes a segment at once, and answers with it when somebody else has another one, or does not
/// come for it.
#[derive(Debug)]
struct Slow {
    old: Segment,
    asked: SyncSender<()>,
    overtaken: Mutex<Receiver<()>>,
}

impl Segments for Slow {
    fn fetch(&self) -> Result<Segment, ExportsError> {
        self.asked.send(())?;
        let overtaken = self.overtaken.lock().expect("no panic");
        let _ = overtaken.recv_timeout(Duration::from_millis(300));
        Ok(self.old.clone())
    }
}

#[test]
fn of_two_segments_that_are_asked_for_at_once_the_newer_one_stays() {
    let (target, segment) = opened();
    let ((asked, hears), (tells, overtaken)) = (sync_channel(1), sync_channel(1));
    let (old, overtaken) = (segment(false), Mutex::new(overtaken));
    target.refresh_from(Arc::new(Slow { old, asked, overtaken }));
    std::thread::scope(|scope| {
        scope.spawn(|| target.ask_again());
        hears.recv().expect("it is asked");
        target.refresh_with(|| Ok::<_, Error>(segment(true))).expect("the same engine's");
        let _ = tells.send(());
    });
    assert!(!target.table().is_private(0), "the older one replaced it");
}
