//! Compact copies do what their expansion would.

use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::{GUARD, allocate, finish, pattern, read, submit_work, write};
use crate::{CompactCopy, CompactEnd, CopyDescriptor, Device, QueueOptions, SliceSource, Work};

/// A compact copy whose addresses are offsets, with page lists of its own.
#[derive(Clone, Debug)]
struct Form {
    copy: CompactCopy<'static>,
    src_pages: Vec<u32>,
    dst_pages: Vec<u32>,
}

impl Form {
    /// Equal lists of page numbers are one and the same list in all forms.
    fn placed<'a>(&self, source: u64, destination: u64, all: &'a [Self]) -> CompactCopy<'a> {
        let lists = || all.iter().flat_map(|form| [&form.src_pages, &form.dst_pages]);
        let list = |own| lists().find(|list| *list == own).expect("it is among all");
        let CompactCopy { src, dst, len, rows, layers, pages } = self.copy;
        let src = CompactEnd { addr: src.addr + source, pages: list(&self.src_pages), ..src };
        let dst = CompactEnd { addr: dst.addr + destination, pages: list(&self.dst_pages), ..dst };
        CompactCopy { src, dst, len, rows, layers, pages }
    }

    /// Offset pairs of every copy that it stands for, by the definition.
    fn pieces(&self) -> Vec<(usize, usize)> {
        let CompactCopy { src, dst, rows, layers, pages, .. } = self.copy;
        let mut pieces = Vec::new();
        for page in 0..pages {
            for layer in 0..layers {
                for row in 0..rows {
                    let at = |end: &CompactEnd<'_>, list: &[u32]| {
                        let number = list.get(page as usize).copied().unwrap_or(page);
                        end.addr
                            + u64::from(number) * end.page_stride
                            + u64::from(layer) * end.layer_stride
                            + u64::from(row) * end.row_stride
                    };
                    let (from, to) = (at(&src, &self.src_pages), at(&dst, &self.dst_pages));
                    pieces.push((from as usize, to as usize));
                }
            }
        }
        pieces
    }

    /// The byte after the last one of either end.
    fn ends(&self) -> (usize, usize) {
        let pieces = self.pieces();
        let len = self.copy.len as usize;
        let end = |of: fn(&(usize, usize)) -> usize| pieces.iter().map(of).max().unwrap_or(0) + len;
        (end(|piece| piece.0), end(|piece| piece.1))
    }
}

/// Runs the forms in one submission, by kernel and by DMA, all of them or the last as its pieces, and
/// checks every byte.
fn copy_and_check(device: &Arc<dyn Device>, forms: &[Form]) {
    let ends = forms.iter().map(Form::ends);
    let (source_len, destination_len) = ends.fold((64, 64), |(source, destination), ends| {
        (source.max(ends.0 + 64), destination.max(ends.1 + 64))
    });
    let source = allocate(device, source_len as u64);
    let destination = allocate(device, destination_len as u64);
    let bytes = pattern(source_len, 3);
    write(device, source.addr(), &bytes);
    let mut expected = vec![GUARD; destination_len];
    for form in forms {
        let len = form.copy.len as usize;
        for (from, to) in form.pieces() {
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
    }
    let placed: Vec<_> =
        forms.iter().map(|form| form.placed(source.addr(), destination.addr(), forms)).collect();
    let options = QueueOptions { ring_slots: 4, slot_descriptors: 64, ..QueueOptions::default() };
    let last = forms.last().expect("a form");
    let piece = |(from, to): (usize, usize)| CopyDescriptor {
        src: source.addr() + from as u64,
        dst: destination.addr() + to as u64,
        len: last.copy.len,
    };
    let pieces: Vec<_> = last.pieces().into_iter().map(piece).collect();
    for kernel in [true, false] {
        for (compact, pieces, max_grid_blocks) in [
            (&placed[..], &[][..], 1),
            (&placed[..], &[][..], u32::MAX),
            (&placed[..forms.len() - 1], &pieces[..], u32::MAX),
        ] {
            write(device, destination.addr(), &vec![GUARD; destination_len]);
            let mut queue = Arc::clone(device).queue(&options).expect("a queue");
            let mut pieces = SliceSource(pieces);
            let mut work = Work { compact, kernel, max_grid_blocks, ..Work::pieces(&mut pieces) };
            let ticket = submit_work(&mut *queue, &mut work);
            finish(&mut *queue, ticket);
            let found = read(device, destination.addr(), destination_len);
            if let Some(at) = (0..destination_len).find(|&at| found[at] != expected[at]) {
                panic!(
                    "byte {at}: expected {:#04x}, found {:#04x}; kernel {kernel}, grid {max_grid_blocks}, {forms:?}",
                    expected[at], found[at]
                );
            }
        }
    }
}

fn shuffled(count: u32, of: u32, random: &mut SmallRng) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..of).collect();
    numbers.shuffle(random);
    numbers.truncate(count as usize);
    numbers
}

/// A random form without overlaps. Some are aligned, so that the kernel's way for planes is taken.
fn random_form(random: &mut SmallRng, align: u64) -> Form {
    let rows = random.random_range(1..=9);
    let layers = random.random_range(1..=5);
    let pages = random.random_range(1..=7);
    let len = match random.random_range(0..4) {
        0 => random.random_range(1..=8),
        1 => random.random_range(1..=300),
        2 => random.random_range(1..=40_000),
        _ => 256,
    };
    let len = u64::next_multiple_of(len, align);
    let lists = random.random_bool(0.5);
    let gap = |random: &mut SmallRng| align * random.random_range(0..=3u64);
    let end = |random: &mut SmallRng, numbers: u32| {
        let addr = align * random.random_range(0..=5u64);
        // Rows inside layers inside pages, or pages inside layers, as caches have them.
        let row_stride = len + gap(random);
        let rows_len = row_stride * u64::from(rows) + gap(random);
        if random.random_bool(0.5) {
            let layer_stride = rows_len;
            let page_stride = layer_stride * u64::from(layers) + gap(random);
            (addr, row_stride, layer_stride, page_stride)
        } else {
            let page_stride = rows_len;
            let layer_stride = page_stride * u64::from(numbers) + gap(random);
            (addr, row_stride, layer_stride, page_stride)
        }
    };
    let numbers = if lists { pages * 2 } else { pages };
    let place = |random: &mut SmallRng| {
        let (addr, row_stride, layer_stride, page_stride) = end(random, numbers);
        CompactEnd { addr, row_stride, layer_stride, page_stride, pages: &[] }
    };
    let (src, dst) = (place(random), place(random));
    let list = |random: &mut SmallRng| match lists {
        true => shuffled(pages, numbers, random),
        false => Vec::new(),
    };
    let copy = CompactCopy { src, dst, len, rows, layers, pages };
    Form { src_pages: list(random), dst_pages: list(random), copy }
}

#[doc(hidden)]
pub fn compact_copies_of_random_form_arrive_whole_and_alone(device: Arc<dyn Device>) {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    for round in 0..60 {
        let align = [1, 16, 16, 4][round % 4];
        copy_and_check(&device, &[random_form(&mut random, align)]);
    }
}

#[doc(hidden)]
pub fn compact_copies_of_real_caches_arrive_whole_and_alone(device: Arc<dyn Device>) {
    let mut random = SmallRng::seed_from_u64(11);
    let end = |addr, row_stride, layer_stride, page_stride| CompactEnd {
        addr,
        row_stride,
        layer_stride,
        page_stride,
        pages: &[],
    };
    let mut paged = |copy: CompactCopy<'static>, of: u32| Form {
        src_pages: shuffled(copy.pages, of, &mut random),
        dst_pages: shuffled(copy.pages, of, &mut random),
        copy,
    };
    // W06: rows of 576 bytes, every eighth, packed. W08: halves of rows. MLA pages of all layers.
    // Head slices: of each token of a page one head of four.
    for form in [
        Form {
            copy: CompactCopy {
                src: end(0, 4608, 0, 0),
                dst: end(64, 576, 0, 0),
                len: 576,
                rows: 5000,
                layers: 1,
                pages: 1,
            },
            src_pages: Vec::new(),
            dst_pages: Vec::new(),
        },
        Form {
            copy: CompactCopy {
                src: end(0, 512, 0, 0),
                dst: end(0, 256, 0, 0),
                len: 256,
                rows: 30_000,
                layers: 1,
                pages: 1,
            },
            src_pages: Vec::new(),
            dst_pages: Vec::new(),
        },
        paged(
            CompactCopy {
                src: end(256, 0, 40 * 73_728 + 256, 73_728),
                dst: end(512, 0, 40 * 73_728 + 512, 73_728),
                len: 73_728,
                rows: 1,
                layers: 3,
                pages: 20,
            },
            40,
        ),
        paged(
            CompactCopy {
                src: end(0, 256, 30 * 16_384, 16_384),
                dst: end(512, 1024, 30 * 65_536, 65_536),
                len: 256,
                rows: 64,
                layers: 4,
                pages: 17,
            },
            30,
        ),
        // Rows that meet on both sides become longer rows, and layers that meet, too.
        paged(
            CompactCopy {
                src: end(16, 96, 960, 4800),
                dst: end(32, 96, 960, 6000),
                len: 96,
                rows: 10,
                layers: 5,
                pages: 9,
            },
            12,
        ),
    ] {
        copy_and_check(&device, &[form]);
    }
}

/// Keys and values name the same lists, an index beside them has its own, and more of them than are
/// remembered take turns.
#[doc(hidden)]
pub fn compact_copies_that_name_the_same_page_lists_arrive(device: Arc<dyn Device>) {
    let mut random = SmallRng::seed_from_u64(13);
    let lists: Vec<_> = (0..5).map(|_| shuffled(13, 40, &mut random)).collect();
    let region = 40 * 96;
    let form = |at: usize, source: usize, destination: usize| {
        let end = CompactEnd {
            addr: at as u64 * region,
            page_stride: 96,
            layer_stride: 64 * region,
            ..CompactEnd::default()
        };
        let (src_pages, dst_pages) = (lists[source].clone(), lists[destination].clone());
        let copy = CompactCopy { src: end, dst: end, len: 80, rows: 1, layers: 2, pages: 13 };
        Form { copy, src_pages, dst_pages }
    };
    copy_and_check(&device, &[form(0, 0, 1), form(1, 0, 1), form(2, 1, 2), form(3, 2, 2)]);
    let turns = (0..60).map(|at| form(at, at % 5, (at + 2 + at / 7) % 5));
    copy_and_check(&device, &turns.collect::<Vec<_>>());
}

/// Lists of numbers that 16 bits hold are placed as such, one beside the other and beside longer ones.
#[doc(hidden)]
pub fn compact_copies_of_pages_below_and_above_65536_arrive(device: Arc<dyn Device>) {
    let mut random = SmallRng::seed_from_u64(17);
    let form = |addr: u64, pages: u32, [src, dst]: [u32; 2], random: &mut SmallRng| {
        let end = CompactEnd { addr, page_stride: 16, ..CompactEnd::default() };
        let copy = CompactCopy { src: end, dst: end, len: 16, rows: 1, layers: 1, pages };
        // The largest and the smallest number that is possible, and what is between.
        let mut list = |highest: u32| {
            let mut list: Vec<u32> = shuffled(pages - 2, highest - 1, random);
            list.iter_mut().for_each(|number| *number += 1);
            list.insert(list.len() / 2, highest);
            list.push(0);
            list
        };
        let (src_pages, dst_pages) = (list(src), list(dst));
        Form { copy, src_pages, dst_pages }
    };
    let (below, above) = (65_535, 65_536);
    for highest in [[below, below], [below, above], [above, below], [above, above]] {
        let region = 16 * (u64::from(above) + 1);
        let forms = (0..4)
            .map(|at| form(u64::from(at) * region, 3 + at % 3 + 300 * at, highest, &mut random));
        copy_and_check(&device, &forms.collect::<Vec<_>>());
    }
}

#[doc(hidden)]
pub fn more_compact_copies_and_page_numbers_than_a_launch_takes_arrive(device: Arc<dyn Device>) {
    let mut random = SmallRng::seed_from_u64(5);
    // A slot of these queues has room for 192 page numbers of both ends; a launch for 32 forms.
    let mut forms = Vec::new();
    let mut start = 0;
    for pages in (1..=70).chain([191, 192, 193, 500]) {
        let end = CompactEnd {
            addr: start,
            row_stride: 48,
            layer_stride: 112 * 600,
            page_stride: 112,
            pages: &[],
        };
        let copy = CompactCopy { src: end, dst: end, len: 32, rows: 2, layers: 2, pages };
        let src_pages = shuffled(pages, 600, &mut random);
        let dst_pages = shuffled(pages, 600, &mut random);
        forms.push(Form { copy, src_pages, dst_pages });
        start += 2 * 112 * 600;
    }
    copy_and_check(&device, &forms);
}

#[doc(hidden)]
pub fn a_compact_copy_of_nothing_completes(device: Arc<dyn Device>) {
    let options = QueueOptions::default();
    let mut queue = Arc::clone(&device).queue(&options).expect("a queue");
    let one = CompactCopy { len: 16, rows: 1, layers: 1, pages: 1, ..CompactCopy::default() };
    for nothing in [
        CompactCopy { len: 0, ..one },
        CompactCopy { rows: 0, ..one },
        CompactCopy { layers: 0, ..one },
        CompactCopy { pages: 0, ..one },
    ] {
        for kernel in [true, false] {
            let mut none = SliceSource(&[]);
            let mut work = Work { compact: &[nothing], kernel, ..Work::pieces(&mut none) };
            let ticket = submit_work(&mut *queue, &mut work);
            finish(&mut *queue, ticket);
        }
    }
}
