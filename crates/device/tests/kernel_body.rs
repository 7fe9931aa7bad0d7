//! The body of `kernels/copy.cu`, compiled as C++ with lanes as loops, copies the right bytes and
//! touches no others.
//!
//! Needs a C++ compiler (`CXX`, else `c++`); without one there is a SKIP line and nothing is tested,
//! or every test fails if `KVFERRY_TEST_REQUIRE` contains `cxx`.

use std::process::Command;
use std::sync::OnceLock;

use kvferry_device::conformance::skip;
use kvferry_device::testing::compact_descriptors;
use kvferry_device::{CompactCopy, CompactEnd, CopyDescriptor};
use libloading::Library;
use proptest::prelude::*;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/copy.cu");

/// What surrounds every destination. No source byte has this value.
const GUARD: u8 = 0xEE;
const GUARD_BYTES: usize = 64;

#[test]
fn every_length_and_alignment_is_copied_exactly_by_warps_of_32() {
    every_length_and_alignment(32);
}

#[test]
fn every_length_and_alignment_is_copied_exactly_by_waves_of_64() {
    every_length_and_alignment(64);
}

/// All 256 pairs of source and destination modulo 16, as one list for each length.
fn every_length_and_alignment(lanes: u32) {
    let Some(kernel) = Kernel::load() else { return };
    const LONGEST: usize = 4097;
    let source = AlignedBytes::source(LONGEST + 16);
    let mut copied = AlignedBytes::guards(256 * slot_bytes(LONGEST));
    let mut expected = copied.clone();
    for len in 0..=LONGEST {
        let list: Vec<Copy> = (0..256)
            .map(|pair| Copy {
                src: pair / 16,
                dst: pair * slot_bytes(len) + GUARD_BYTES + pair % 16,
                len,
            })
            .collect();
        let used = 256 * slot_bytes(len);
        copied.bytes_mut()[..used].fill(GUARD);
        expected.bytes_mut()[..used].fill(GUARD);
        copy_all(&list, &source, &mut expected);
        kernel.copy(&list, &source, &mut copied, 3, lanes);
        assert_same(&list, &copied.bytes()[..used], &expected.bytes()[..used]);
    }
}

#[test]
fn any_grid_runs_the_whole_list_and_nothing_beyond_it() {
    let Some(kernel) = Kernel::load() else { return };
    let source = AlignedBytes::source(4096);
    for lanes in [32, 64] {
        for count in [0, 1, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000] {
            // Mixed lengths, so that a descriptor that meets another's length cannot go unnoticed.
            let list =
                lay_out((0..count).map(|index| (index * 7 % 61, index % 16, index * 37 % 300)));
            let total = list.last().map_or(0, |last| last.dst + last.len) + GUARD_BYTES;
            let mut expected = AlignedBytes::guards(total);
            copy_all(&list, &source, &mut expected);
            for grid in [1, 2, 3, 16, 132, 528] {
                let mut copied = AlignedBytes::guards(total);
                kernel.copy(&list, &source, &mut copied, grid, lanes);
                assert!(
                    copied.bytes() == expected.bytes(),
                    "{count} descriptors, grid {grid}, lanes {lanes}: {}",
                    first_difference(&list, copied.bytes(), expected.bytes()),
                );
            }
        }
    }
}

/// A page that must not be touched lies right after and right before the source, so a load of a
/// word without a source byte ends the test with SIGSEGV.
#[test]
fn no_load_leaves_the_pages_of_the_source() {
    let Some(kernel) = Kernel::load() else { return };
    let pages = FencedPages::new();
    for lanes in [32, 64] {
        for len in (1..=1100).chain([2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192]) {
            let to_end = pages.len() - len;
            let starts = (0..16).chain(to_end.saturating_sub(15)..=to_end);
            let starts: Vec<usize> = starts.filter(|start| start + len <= pages.len()).collect();
            let list =
                lay_out(starts.iter().flat_map(|&start| (0..16).map(move |dst| (start, dst, len))));
            let total = list.last().map_or(0, |last| last.dst + last.len) + GUARD_BYTES;
            let mut copied = AlignedBytes::guards(total);
            let mut expected = copied.clone();
            for copy in &list {
                expected.bytes_mut()[copy.dst..][..len]
                    .copy_from_slice(&pages.bytes()[copy.src..][..len]);
            }
            kernel.copy_from(&list, pages.bytes(), &mut copied, 1, lanes);
            assert_same(&list, copied.bytes(), expected.bytes());
        }
    }
}

/// Prefetching stops at the end of the list: a page that must not be touched lies right after it.
#[test]
fn no_descriptor_beyond_the_list_is_read() {
    let Some(kernel) = Kernel::load() else { return };
    let mut pages = FencedPages::new();
    let source = AlignedBytes::source(4096);
    for lanes in [32, 64] {
        for count in 0..40 {
            let list = lay_out((0..count).map(|index| (index, 0, index)));
            let total = list.last().map_or(0, |last| last.dst + last.len) + GUARD_BYTES;
            let mut copied = AlignedBytes::guards(total);
            let mut expected = copied.clone();
            copy_all(&list, &source, &mut expected);
            let descriptors = descriptors(&list, source.bytes(), copied.bytes_mut());
            kernel.run(pages.place_at_end(&descriptors), 2, lanes);
            assert_same(&list, copied.bytes(), expected.bytes());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_lists_are_copied_exactly(
        pieces in prop::collection::vec((0..4096usize, 0..16usize, 0..200_000usize), 0..24),
        grid in 1..20u32,
        lanes in prop::sample::select(vec![32, 64]),
    ) {
        let Some(kernel) = Kernel::load() else { return Ok(()) };
        static BYTES: OnceLock<AlignedBytes> = OnceLock::new();
        let source = BYTES.get_or_init(|| AlignedBytes::source(4096 + 200_000));
        let list = lay_out(pieces);
        let mut copied = AlignedBytes::guards(list.last().map_or(0, |last| last.dst + last.len) + GUARD_BYTES);
        let mut expected = copied.clone();
        copy_all(&list, source, &mut expected);
        kernel.copy(&list, source, &mut copied, grid, lanes);
        prop_assert!(
            copied.bytes() == expected.bytes(),
            "grid {grid}, lanes {lanes}: {}",
            first_difference(&list, copied.bytes(), expected.bytes()),
        );
    }

    #[test]
    fn random_compact_copies_are_copied_exactly(
        forms in prop::collection::vec(form(), 1..6),
        grid in 1..9u32,
        lanes in prop::sample::select(vec![32, 64]),
        warps in 1..200u64,
        tile in prop::sample::select(vec![16u64, 100, 4096, 16 << 10]),
        narrow: bool,
    ) {
        let Some(kernel) = Kernel::load() else { return Ok(()) };
        let source = AlignedBytes::source(forms.iter().map(Form::source_end).max().unwrap_or(0) + 16);
        let mut list = Vec::new();
        let mut end = GUARD_BYTES;
        let mut bases = Vec::new();
        for form in &forms {
            bases.push(end);
            let pieces = form.pieces();
            list.extend(pieces.iter().map(|&(src, dst)| Copy { src, dst: end + dst, len: form.len }));
            let last = pieces.iter().map(|&(_, dst)| dst).max().unwrap_or(0);
            end = (end + last + form.len + GUARD_BYTES).next_multiple_of(16);
        }
        let mut copied = AlignedBytes::guards(end);
        let mut expected = copied.clone();
        copy_all(&list, &source, &mut expected);
        let from = source.bytes().as_ptr().expose_provenance() as u64;
        let to = copied.bytes_mut().as_mut_ptr().expose_provenance() as u64;
        let copies: Vec<_> =
            forms.iter().zip(&bases).map(|(form, base)| form.copy(from, to + *base as u64)).collect();
        let mut descriptors = compact_descriptors(&copies, warps, tile);
        let lists = forms.iter().flat_map(|form| [&form.src_pages, &form.dst_pages]);
        let halves: Vec<_> = lists.map(|list| (list.as_ptr().expose_provenance() as u64, halves(list))).collect();
        for list in descriptors.iter_mut().flat_map(|words| &mut words[9..11]).filter(|_| narrow) {
            if let Some((_, halves)) = halves.iter().find(|(address, _)| address == list) {
                *list = halves.as_ptr().expose_provenance() as u64 | 1;
            }
        }
        kernel.run_compact(&descriptors, grid, lanes);
        prop_assert!(
            copied.bytes() == expected.bytes(),
            "grid {grid}, lanes {lanes}, warps {warps}, tile {tile}, narrow {narrow}: {}",
            first_difference(&list, copied.bytes(), expected.bytes()),
        );
    }
}

/// A plane ends with its last word, at the last byte before a page that must not be touched.
#[test]
fn no_load_of_a_plane_leaves_the_pages_of_the_source() {
    let Some(kernel) = Kernel::load() else { return };
    let pages = FencedPages::new();
    for lanes in [32, 64] {
        for (len, rows, gap) in
            [(16, 700, 0), (48, 99, 16), (2112, 5, 64), (256, 47, 0), (16, 1, 0)]
        {
            let stride = len + gap;
            let bytes = (rows - 1) * stride + len;
            for start in [0, pages.len() - bytes] {
                let mut copied = AlignedBytes::guards(bytes + 2 * GUARD_BYTES);
                let mut expected = copied.clone();
                for row in 0..rows {
                    expected.bytes_mut()[GUARD_BYTES + row * stride..][..len]
                        .copy_from_slice(&pages.bytes()[start + row * stride..][..len]);
                }
                let end = |addr: u64| CompactEnd {
                    addr,
                    row_stride: stride as u64,
                    ..CompactEnd::default()
                };
                let copy = CompactCopy {
                    src: end(pages.bytes()[start..].as_ptr().expose_provenance() as u64),
                    dst: end(
                        copied.bytes_mut()[GUARD_BYTES..].as_mut_ptr().expose_provenance() as u64
                    ),
                    len: len as u64,
                    rows: rows as u32,
                    layers: 1,
                    pages: 1,
                };
                kernel.run_compact(&compact_descriptors(&[copy], 8, 4096), 2, lanes);
                assert!(copied.bytes() == expected.bytes(), "{rows} rows of {len}, lanes {lanes}");
            }
        }
    }
}

/// Page numbers of 16 bits, two in each word.
fn halves(list: &[u32]) -> Vec<u32> {
    list.chunks(2)
        .map(|pair| pair.iter().rev().fold(0, |word, number| word << 16 | number))
        .collect()
}

/// A compact copy as offsets, without overlaps at the destination.
#[derive(Clone, Debug)]
struct Form {
    src: [usize; 4],
    dst: [usize; 4],
    counts: [usize; 3],
    len: usize,
    src_pages: Vec<u32>,
    dst_pages: Vec<u32>,
}

/// Addresses and strides are multiples of 16, and planes, half of the time.
fn form() -> impl Strategy<Value = Form> {
    let counts = (1..7usize, 1..5usize, 1..40usize);
    let gaps = prop::array::uniform8(0..40usize);
    let len = prop_oneof![1..20usize, 1..300usize, Just(256), 1..9000usize];
    // The layers of a page side by side, or the pages of a layer.
    let page_first = any::<bool>();
    (counts, gaps, len, any::<bool>(), any::<bool>(), page_first, any::<u64>()).prop_map(
        |((pages, layers, rows), gaps, len, aligned, lists, page_first, seed)| {
            let align = if aligned { 16 } else { 1 };
            let len = len.next_multiple_of(align);
            let numbers = if lists { 2 * pages } else { pages };
            let end = |gaps: &[usize]| {
                let row = len + gaps[0] * align;
                let near = rows * row + gaps[1] * align;
                let far = near * if page_first { layers } else { numbers } + gaps[2] * align;
                let (page, layer) = if page_first { (far, near) } else { (near, far) };
                [gaps[3] * align, page, layer, row]
            };
            let list = |salt: u64| {
                let mut list: Vec<u32> = (0..numbers as u32).collect();
                list.sort_by_key(|number| (u64::from(*number) + 1).wrapping_mul(seed ^ salt | 1));
                list.truncate(if lists { pages } else { 0 });
                list
            };
            Form {
                src: end(&gaps[..4]),
                dst: end(&gaps[4..]),
                counts: [pages, layers, rows],
                len,
                src_pages: list(0x5851_F42D_4C95_7F2D),
                dst_pages: list(0x1405_7B7E_F767_814F),
            }
        },
    )
}

impl Form {
    fn pieces(&self) -> Vec<(usize, usize)> {
        let [pages, layers, rows] = self.counts;
        let at = |end: &[usize; 4], list: &[u32], [page, layer, row]: [usize; 3]| {
            let number = list.get(page).map_or(page, |number| *number as usize);
            end[0] + number * end[1] + layer * end[2] + row * end[3]
        };
        let mut pieces = Vec::new();
        for page in 0..pages {
            for layer in 0..layers {
                for row in 0..rows {
                    let index = [page, layer, row];
                    let from = at(&self.src, &self.src_pages, index);
                    pieces.push((from, at(&self.dst, &self.dst_pages, index)));
                }
            }
        }
        pieces
    }

    fn source_end(&self) -> usize {
        self.pieces().iter().map(|&(src, _)| src + self.len).max().unwrap_or(0)
    }

    fn copy(&self, from: u64, to: u64) -> CompactCopy<'_> {
        let end = |base: u64, [addr, page, layer, row]: [usize; 4], pages| CompactEnd {
            addr: base + addr as u64,
            row_stride: row as u64,
            layer_stride: layer as u64,
            page_stride: page as u64,
            pages,
        };
        let [pages, layers, rows] = self.counts.map(|count| count as u32);
        let (src, dst) =
            (end(from, self.src, &self.src_pages[..]), end(to, self.dst, &self.dst_pages[..]));
        CompactCopy { src, dst, len: self.len as u64, rows, layers, pages }
    }
}

/// One copy, as offsets into a source and a destination buffer.
#[derive(Clone, Copy, Debug)]
struct Copy {
    src: usize,
    dst: usize,
    len: usize,
}

/// Places pieces of (source offset, destination modulo 16, length) one after the other, with
/// guards between.
fn lay_out(pieces: impl IntoIterator<Item = (usize, usize, usize)>) -> Vec<Copy> {
    let mut base = 0;
    let place = |(src, misalignment, len)| {
        let dst = base + GUARD_BYTES + misalignment;
        base += slot_bytes(len);
        Copy { src, dst, len }
    };
    pieces.into_iter().map(place).collect()
}

/// Room for one destination at any alignment and the guard before it.
fn slot_bytes(len: usize) -> usize {
    (GUARD_BYTES + 15 + len).next_multiple_of(16)
}

/// The list as the kernel reads it.
fn descriptors(list: &[Copy], source: &[u8], destination: &mut [u8]) -> Vec<CopyDescriptor> {
    list.iter()
        .map(|&Copy { src, dst, len }| CopyDescriptor {
            src: source[src..][..len].as_ptr().expose_provenance() as u64,
            dst: destination[dst..][..len].as_mut_ptr().expose_provenance() as u64,
            len: len as u64,
        })
        .collect()
}

fn copy_all(list: &[Copy], source: &AlignedBytes, destination: &mut AlignedBytes) {
    for &Copy { src, dst, len } in list {
        destination.bytes_mut()[dst..][..len].copy_from_slice(&source.bytes()[src..][..len]);
    }
}

fn assert_same(list: &[Copy], copied: &[u8], expected: &[u8]) {
    assert!(copied == expected, "{}", first_difference(list, copied, expected));
}

/// Names the first wrong byte relative to the copy that it belongs to or lies nearest after.
fn first_difference(list: &[Copy], copied: &[u8], expected: &[u8]) -> String {
    let Some(at) = copied.iter().zip(expected).position(|(copied, expected)| copied != expected)
    else {
        return "no difference".into();
    };
    let found = format!("byte {at} is {:#04x}, not {:#04x}", copied[at], expected[at]);
    match list.iter().rfind(|copy| copy.dst <= at).or(list.first()) {
        Some(copy) => format!(
            "{found}: {} from the start of {} bytes, source modulo 16 is {}, destination {}",
            at as isize - copy.dst as isize,
            copy.len,
            copy.src % 16,
            copy.dst % 16,
        ),
        None => found,
    }
}

/// Bytes at a 16-byte boundary, so that offsets into them are alignments.
#[derive(Clone)]
struct AlignedBytes {
    words: Vec<u128>,
    len: usize,
}

impl AlignedBytes {
    fn guards(len: usize) -> Self {
        let words = vec![u128::from_ne_bytes([GUARD; 16]); len.div_ceil(16)];
        Self { words, len }
    }

    fn source(len: usize) -> Self {
        let mut source = Self::guards(len);
        fill_source(source.bytes_mut());
        source
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the vector owns at least `len` initialised bytes, borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, borrowed exclusively; every bit pattern is a valid u128.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) }
    }
}

/// Bytes without a short period, so that a byte from the wrong place shows; never [`GUARD`].
fn fill_source(bytes: &mut [u8]) {
    let mut state = 1u32;
    for byte in bytes {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = (state >> 24) as u8;
        *byte = if value == GUARD { 0 } else { value };
    }
}

/// Readable pages between two that are not.
struct FencedPages {
    base: *mut u8,
    page: usize,
}

impl FencedPages {
    const PAGES: usize = 3;

    fn new() -> Self {
        let page = rustix::param::page_size();
        let bytes = (Self::PAGES + 2) * page;
        // SAFETY: a new private mapping, at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE)
        }
        .expect("a few pages of address space")
        .cast::<u8>();
        let pages = Self { base, page };
        // SAFETY: the middle pages of the mapping above, which nothing refers to yet.
        let middle = unsafe {
            mprotect(
                base.add(page).cast(),
                pages.len(),
                MprotectFlags::READ | MprotectFlags::WRITE,
            )
            .expect("pages of our own mapping");
            std::slice::from_raw_parts_mut(base.add(page), pages.len())
        };
        fill_source(middle);
        pages
    }

    fn len(&self) -> usize {
        Self::PAGES * self.page
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the middle pages are readable, zero-initialised, and live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.add(self.page), self.len()) }
    }

    fn place_at_end(&mut self, descriptors: &[CopyDescriptor]) -> &[CopyDescriptor] {
        let start = self.len().checked_sub(size_of_val(descriptors)).expect("a list that fits");
        // SAFETY: the range lies in the writable middle pages, lent exclusively; a page's size and
        // 24 are multiples of 8, so the start is aligned.
        unsafe {
            let first = self.base.add(self.page + start).cast::<CopyDescriptor>();
            first.copy_from_nonoverlapping(descriptors.as_ptr(), descriptors.len());
            std::slice::from_raw_parts(first, descriptors.len())
        }
    }
}

impl Drop for FencedPages {
    fn drop(&mut self) {
        // SAFETY: the whole mapping of `new`, whose bytes are only lent with `self`.
        let _ = unsafe { munmap(self.base.cast(), self.len() + 2 * self.page) };
    }
}

/// The compiled kernel body.
struct Kernel(Library);

impl Kernel {
    /// `None`, with a line on stderr, where there is no C++ compiler. A compiler that rejects the
    /// source is a failure.
    fn load() -> Option<&'static Self> {
        static KERNEL: OnceLock<Result<Kernel, String>> = OnceLock::new();
        let kernel =
            KERNEL.get_or_init(|| Self::compile().inspect_err(|reason| skip("cxx", reason)));
        kernel.as_ref().ok()
    }

    fn compile() -> Result<Self, String> {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let directory = tempfile::tempdir().expect("a temporary directory");
        let library = directory.path().join("libcopy.so");
        let output = Command::new(&compiler)
            .args([
                "-x",
                "c++",
                "-std=c++17",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-shared",
                "-fPIC",
            ])
            .args(["-DKVFERRY_HOST", SOURCE, "-o"])
            .arg(&library)
            .output()
            .map_err(|error| format!("cannot run the C++ compiler {compiler}: {error}"))?;
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: compiled from our own source just now; it has no constructors.
        let library = unsafe { Library::new(&library) }.expect("the library that was just built");
        Ok(Self(library))
    }

    fn copy(
        &self,
        list: &[Copy],
        source: &AlignedBytes,
        destination: &mut AlignedBytes,
        grid: u32,
        lanes: u32,
    ) {
        self.copy_from(list, source.bytes(), destination, grid, lanes);
    }

    fn copy_from(
        &self,
        list: &[Copy],
        source: &[u8],
        destination: &mut AlignedBytes,
        grid: u32,
        lanes: u32,
    ) {
        self.run(&descriptors(list, source, destination.bytes_mut()), grid, lanes);
    }

    /// `descriptors` come from [`compact_descriptors`], and the buffers are still there.
    fn run_compact(&self, descriptors: &[[u64; 15]], grid: u32, lanes: u32) {
        // SAFETY: the signature in copy.cu; the words are those of its structure.
        let run = unsafe {
            self.0.get::<unsafe extern "C" fn(*const [u64; 15], u32, u32, u32)>(
                b"kvferry_copy_compact_host",
            )
        }
        .expect("the entry point of the host build");
        // SAFETY: every copy lies inside buffers that the test holds, untouched, until this
        // returns, and destinations are apart.
        unsafe { run(descriptors.as_ptr(), descriptors.len() as u32, grid, lanes) }
    }

    /// `descriptors` come from [`descriptors`], and its buffers are still there.
    fn run(&self, descriptors: &[CopyDescriptor], grid: u32, lanes: u32) {
        // SAFETY: the signature in copy.cu; the descriptor is `repr(C)`.
        let run = unsafe {
            self.0.get::<unsafe extern "C" fn(*const CopyDescriptor, u32, u32, u32)>(
                b"kvferry_copy_host",
            )
        }
        .expect("the entry point of the host build");
        // SAFETY: `descriptors` checked every range against its buffer, lists keep destinations
        // apart, and each test holds both buffers, untouched, until this returns.
        unsafe { run(descriptors.as_ptr(), descriptors.len() as u32, grid, lanes) }
    }
}

/// As the host passes them to the kernel: see `Claims` in copy.cu.
#[repr(C)]
struct Claims {
    table: u64,
    verdict: u64,
    low: u64,
    log2: u32,
    shift: u32,
    first: u32,
    blocks: u32,
}

proptest! {
    #[test]
    fn a_claim_is_refused_exactly_when_a_byte_has_two_owners(
        shift in 0..7u32, offset in 0..100u64,
        // In granules; by turns where the next destination begins behind the end of the last.
        pieces in prop::collection::vec((-2..80i64, 0..200u64), 1..150),
        blocks in 1..4u32, crowded: bool, order: u64,
    ) {
        let Some(kernel) = Kernel::load() else { return Ok(()) };
        let mut next = 10;
        let mut list: Vec<CopyDescriptor> = pieces.iter().map(|&(gap, len)| {
            // Only some of the lists have overlaps.
            let gap = if order % 3 == 0 { gap } else { gap.max(0) };
            let start = (next + gap).max(0);
            next = start + len as i64;
            CopyDescriptor { src: 0, dst: offset + ((start as u64) << shift), len: len << shift }
        }).collect();
        list.sort_by_key(|copy| (copy.dst ^ order).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let filled = || list.iter().enumerate().filter(|(_, copy)| copy.len > 0);
        let overlaps = |(index, copy): (usize, &CopyDescriptor)| {
            filled().any(|(other, it)| {
                other != index && it.dst < copy.dst + copy.len && copy.dst < it.dst + it.len
            })
        };
        let bytes: u64 = list.iter().map(|copy| copy.len).sum();
        let touched = (bytes >> shift) / 32 + 2 * list.len() as u64;
        // As full as the host lets it become, or a little more.
        let room = if crowded { touched + 1 } else { 2 * touched };
        let log2 = room.max(2).next_power_of_two().ilog2();
        let mut table = vec![0u64; 1 << log2];
        let mut verdict = u32::MAX;
        let low = filled().map(|(_, copy)| copy.dst).min().unwrap_or(0);
        let claims = Claims {
            table: table.as_mut_ptr() as u64, verdict: &raw mut verdict as u64, low, log2, shift,
            first: 1000, blocks,
        };
        // SAFETY: the signature in copy.cu, without blocks that copy: no source is read.
        let claim = unsafe {
            kernel.0.get::<unsafe extern "C" fn(*const CopyDescriptor, u32, *const Claims, u32, u32)>(
                b"kvferry_copy_claimed_host",
            )
        }.expect("the entry point of the host build");
        // SAFETY: the table and the verdict live until this returns.
        unsafe { claim(list.as_ptr(), list.len() as u32, &claims, blocks, 32) };
        match verdict {
            u32::MAX => prop_assert!(!filled().any(overlaps), "{:?}", list),
            index => {
                let index = index as usize - 1000;
                prop_assert!(index < list.len() && overlaps((index, &list[index])), "{} of {:?}", index, list);
            }
        }
    }
}
