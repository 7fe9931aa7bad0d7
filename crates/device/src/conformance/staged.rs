//! Staged work: pieces and DMAs that share two buffers, step by step.

use std::sync::Arc;

use super::{Application, allocate, finish, pattern, read, submit_work, write};
use crate::{
    CompactCopy, CopyDescriptor, Device, Memory, Producer, Queue, QueueOptions, Rows, SliceSource,
    Stage, StageSource, Staged, Ticket, Work,
};

/// Bytes of a piece; odd, so that pieces of one step have all alignments.
const PIECE: u64 = 97;

/// Scattered pieces at one end, one run of bytes at the other, and two buffers between them.
struct Passage {
    memory: Memory,
    pieces: u64,
    /// Pieces of a step.
    step: u64,
    /// From the run to the scattered pieces, and not the other way.
    load: bool,
}

/// The steps of one passage.
struct Steps<'a> {
    passage: &'a Passage,
    next: u64,
    dma: [CompactCopy<'static>; 1],
}

impl Passage {
    fn new(device: &Arc<dyn Device>, pieces: u64, step: u64, load: bool) -> Self {
        let bytes = 2 * pieces * PIECE + 2 * step * PIECE + pieces;
        Self { memory: allocate(device, bytes), pieces, step, load }
    }

    /// Where a piece lies among the scattered: a byte apart, in an order of its own.
    fn scattered(&self, piece: u64) -> u64 {
        let slot = (piece * 7919) % self.pieces;
        self.memory.addr() + slot * (PIECE + 1)
    }

    fn run(&self) -> u64 {
        self.memory.addr() + self.pieces * (PIECE + 1)
    }

    fn buffer(&self, step: u64) -> u64 {
        self.run() + self.pieces * PIECE + step % 2 * self.step * PIECE
    }

    fn fill(&self, device: &Arc<dyn Device>, seed: u64) -> Vec<u8> {
        let bytes = pattern((self.pieces * PIECE) as usize, seed);
        let mut scattered = vec![0; (self.pieces * (PIECE + 1)) as usize];
        let mut run = vec![0; bytes.len()];
        if self.load {
            run.copy_from_slice(&bytes);
        } else {
            self.spread(&bytes, &mut scattered);
        }
        write(device, self.memory.addr(), &scattered);
        write(device, self.run(), &run);
        bytes
    }

    fn spread(&self, bytes: &[u8], scattered: &mut [u8]) {
        for (piece, bytes) in (0..).zip(bytes.chunks(PIECE as usize)) {
            let at = (self.scattered(piece) - self.memory.addr()) as usize;
            scattered[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn check(&self, device: &Arc<dyn Device>, bytes: &[u8]) {
        if self.load {
            let mut expected = vec![0; (self.pieces * (PIECE + 1)) as usize];
            self.spread(bytes, &mut expected);
            assert!(read(device, self.memory.addr(), expected.len()) == expected, "scattered");
        } else {
            assert!(read(device, self.run(), bytes.len()) == bytes, "gathered");
        }
    }

    fn submit(
        &self,
        queue: &mut dyn Queue,
        behind: &[Ticket],
        after: Option<Producer>,
        kernel: bool,
    ) -> Ticket {
        let mut stages = Steps { passage: self, next: 0, dma: [CompactCopy::default()] };
        let mut nothing = SliceSource(&[]);
        let staged = Some(Staged { stages: &mut stages, behind, may_leave: &mut || true });
        submit_work(queue, &mut Work { staged, after, kernel, ..Work::pieces(&mut nothing) })
    }
}

impl StageSource for Steps<'_> {
    fn has_next(&self) -> bool {
        self.next < self.passage.pieces
    }

    fn ahead(&mut self) -> &[CompactCopy<'_>] {
        if self.is_ahead() {
            let end = self.passage.pieces.min(self.next + self.passage.step);
            self.dma = [self.rows(end).compact()];
        }
        if self.is_ahead() { &self.dma } else { &[] }
    }

    fn next(&mut self, slot: &mut [CopyDescriptor]) -> Stage<'_> {
        let passage = self.passage;
        let step = self.next / passage.step;
        let buffer = passage.buffer(step);
        let first = self.next;
        let end = passage.pieces.min((step + 1) * passage.step).min(first + slot.len() as u64);
        for (place, piece) in slot.iter_mut().zip(first..end) {
            let (scattered, gathered) =
                (passage.scattered(piece), buffer + (piece - first) * PIECE);
            let (src, dst) =
                if passage.load { (gathered, scattered) } else { (scattered, gathered) };
            *place = CopyDescriptor { src, dst, len: PIECE };
        }
        self.dma = [self.rows(end).compact()];
        self.next = end;
        assert!(
            end == passage.pieces || end.is_multiple_of(passage.step),
            "a step fits into a slot"
        );
        let (pieces, dma_first) = ((end - first) as usize, passage.load);
        let dma = if self.is_ahead() { &[] } else { &self.dma[..] };
        Stage { pieces, dma, dma_first }
    }
}

impl Steps<'_> {
    /// Loads of even steps say early what they read.
    fn is_ahead(&self) -> bool {
        self.passage.load && self.passage.step.is_multiple_of(2)
    }

    /// Between the buffer of the next step and the run, up to piece `end`.
    fn rows(&self, end: u64) -> Rows {
        let (passage, first) = (self.passage, self.next);
        let buffer = passage.buffer(first / passage.step);
        let run = passage.run() + first * PIECE;
        let (src, dst) = if passage.load { (run, buffer) } else { (buffer, run) };
        let count = end - first;
        Rows { src, dst, len: PIECE, src_pitch: PIECE, dst_pitch: PIECE, count }
    }
}

fn queue(device: &Arc<dyn Device>, streams: usize) -> Box<dyn Queue> {
    let options =
        QueueOptions { streams, ring_slots: 3, slot_descriptors: 512, ..QueueOptions::default() };
    Arc::clone(device).queue(&options).expect("a queue")
}

#[doc(hidden)]
pub fn staged_work_passes_two_buffers_whole(device: Arc<dyn Device>) {
    for streams in [1, 2, 4] {
        let mut queue = queue(&device, streams);
        // Steps in the kernel's parameters and in the ring, more than it holds.
        for (pieces, step) in [(1, 1), (100, 100), (1000, 60), (1021, 16), (4001, 128)] {
            for load in [false, true] {
                let passage = Passage::new(&device, pieces, step, load);
                let bytes = passage.fill(&device, pieces);
                let ticket = passage.submit(&mut *queue, &[], None, step != 60);
                finish(&mut *queue, ticket);
                passage.check(&device, &bytes);
            }
        }
    }
}

#[doc(hidden)]
pub fn staged_work_waits_for_what_uses_its_buffers(device: Arc<dyn Device>) {
    let mut queue = queue(&device, 4);
    for load in [false, true] {
        let passage = Passage::new(&device, 3000, 128, load);
        let bytes = passage.fill(&device, 7);
        let mut behind: Vec<Ticket> = Vec::new();
        for _ in 0..20 {
            behind = vec![passage.submit(&mut *queue, &behind, None, true)];
        }
        finish(&mut *queue, behind[0]);
        passage.check(&device, &bytes);
    }
}

#[doc(hidden)]
pub fn staged_work_waits_for_its_producer((device, stream): Application) {
    let stream = stream();
    let mut queue = queue(&device, 2);
    // More steps than half of the ring holds would wait for the producer here.
    for (pieces, step) in [(400, 400), (400, 30)] {
        for load in [false, true] {
            let passage = Passage::new(&device, pieces, step, load);
            passage.fill(&device, 0);
            let (source, len) = match load {
                true => (passage.run(), pieces * PIECE),
                false => (passage.memory.addr(), pieces * (PIECE + 1)),
            };
            stream.hold();
            // SAFETY: nobody else uses the source until the work below, which waits for this.
            unsafe { stream.fill(source, 9, len) };
            // SAFETY: the stream lives longer than the submission.
            let after = unsafe { Producer::stream(stream.handle()) };
            let first = passage.submit(&mut *queue, &[], Some(after), true);
            let second = passage.submit(&mut *queue, &[first], None, true);
            std::thread::sleep(std::time::Duration::from_millis(30));
            queue.check().expect("works");
            let completions = queue.completions();
            assert!(!completions.done(first) && !completions.done(second), "did not wait");
            stream.open();
            finish(&mut *queue, second);
            finish(&mut *queue, first);
            passage.check(&device, &vec![9; (pieces * PIECE) as usize]);
        }
    }
}
