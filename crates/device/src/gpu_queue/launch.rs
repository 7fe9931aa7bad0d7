//! How the work of a submission gets to the device: launches from the ring or from the kernel's
//! parameters, and DMAs.

use multiversion::multiversion;

use super::{GpuQueue, Open};
use crate::compact::{CompactCopy, CompactDescriptor, MOST_UNITS, NARROW, Rows};
use crate::device::Capabilities;
use crate::driver::Driver;
use crate::error::Result;
use crate::kernel::{BLOCK_THREADS, COMPACT_DESCRIPTORS, Entry, INLINE_DESCRIPTORS};
use crate::queue::{CopyDescriptor, CopySource, Work};

impl<D: Driver> GpuQueue<D> {
    pub(super) fn kernel(&self) -> bool {
        self.device.driver.info().capabilities.contains(Capabilities::KERNEL)
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    pub(super) unsafe fn enqueue(&mut self, open: &mut Open<D>, work: &mut Work<'_>) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.copy(open, work.first) }?;
        if work.kernel && self.kernel() {
            let destinations = work.destinations.as_deref_mut();
            open.claiming = destinations.and_then(|it| self.begin_claims(it, open.max_grid_blocks));
            let is_last = work.compact.iter().all(CompactCopy::is_empty);
            // SAFETY: the caller's contract.
            unsafe { self.launch_pieces(open, work.pieces, is_last) }?;
            // SAFETY: the caller's contract.
            unsafe { self.launch_compact(open, work.compact) }?;
        } else {
            // SAFETY: the caller's contract.
            unsafe { self.copy_pieces(open, work.pieces) }?;
            // SAFETY: the caller's contract.
            unsafe { self.copy_compact(open, work.compact) }?;
        }
        // SAFETY: the caller's contract.
        unsafe { self.copy(open, work.large) }?;
        // SAFETY: the caller's contract.
        unsafe { self.copy(open, work.last) }?;
        match &mut work.staged {
            // SAFETY: the caller's contract.
            Some(staged) => unsafe { self.enqueue_stages(open, staged) },
            None => Ok(()),
        }
    }

    /// The list for a few descriptors, until it is put back: a new one behind a panic of whoever was to
    /// fill it, since into none no piece fits.
    fn take_few(&mut self) -> Vec<CopyDescriptor> {
        match std::mem::take(&mut self.few_list) {
            few if few.is_empty() => few_list(),
            few => few,
        }
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn launch_pieces(
        &mut self,
        open: &mut Open<D>,
        pieces: &mut dyn CopySource,
        is_last: bool,
    ) -> Result<()> {
        let mut few = self.take_few();
        // SAFETY: the caller's contract.
        let launched = unsafe { self.launch_pieces_after(open, pieces, &mut few, is_last) };
        self.few_list = few;
        launched
    }

    /// `few` has room for one descriptor more than fit into the kernel's parameters: a batch that
    /// does fit needs no slot, and its first bytes do not wait for a read over PCIe.
    ///
    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn launch_pieces_after(
        &mut self,
        open: &mut Open<D>,
        pieces: &mut dyn CopySource,
        few: &mut [CopyDescriptor],
        is_last: bool,
    ) -> Result<()> {
        let few_at_most = few.len().min(self.options.slot_descriptors);
        let mut count = fill(pieces, &mut few[..few_at_most]);
        if count == 0 {
            return Ok(());
        }
        let claims = open.claiming.is_some();
        if count <= INLINE_DESCRIPTORS && count < few_at_most && !claims {
            let blocks = self.blocks(open, Entry::Inline, count as u32);
            let stream = self.use_stream(open)?;
            let end = self.end_for(open).filter(|_| is_last);
            // SAFETY: the caller's contract; the word is this submission's, and so is its count.
            unsafe { self.device.driver.launch_inline(stream, &few[..count], blocks, end) }?;
            open.ends = end.is_some();
            return Ok(());
        }
        // The first launch is short, so that the device works while the rest is packed.
        let mut room =
            self.options.first_descriptors.clamp(few_at_most, self.options.slot_descriptors);
        let mut packed = count;
        loop {
            let slot = self.take_slot(open)?;
            let place = &mut self.slot(slot)[..room];
            place[..packed].copy_from_slice(&few[..packed]);
            count = packed + fill(pieces, &mut place[packed..]);
            packed = 0;
            if count == 0 {
                self.return_slot(open);
                return Ok(());
            }
            let blocks = self.blocks(open, Entry::Ring, count as u32);
            let stream = self.use_stream(open)?;
            let descriptors = self.slot_address(slot);
            // SAFETY: the caller's contract; the slot stays as it is until its event fires or the
            // submission is done, because only then it becomes free.
            unsafe {
                match claims {
                    true => self.launch_claimed(open, stream, descriptors, count as u32),
                    false => self.device.driver.launch(stream, descriptors, count as u32, blocks),
                }
            }?;
            open.reader = Some(stream);
            // Filling stops only at the end of the room or of the source.
            if count < room {
                return Ok(());
            }
            room = self.options.slot_descriptors;
        }
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn launch_compact(
        &mut self,
        open: &mut Open<D>,
        copies: &[CompactCopy<'_>],
    ) -> Result<()> {
        let mut list = std::mem::take(&mut self.compact_list);
        let mut launch = CompactLaunch::new(&mut list);
        let mut started = Ok(());
        for copy in copies.iter().filter(|copy| !copy.is_empty()) {
            // SAFETY: the caller's contract.
            started = unsafe { self.place_compact(open, &mut launch, copy.normal()) };
            if started.is_err() {
                break;
            }
        }
        // SAFETY: the caller's contract.
        let started = started.and_then(|()| unsafe { self.start_compact(open, &mut launch, true) });
        list.clear();
        self.compact_list = list;
        started
    }

    /// Adds a copy to the launch, in parts if it is too large for one, and starts what is full.
    ///
    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn place_compact<'a>(
        &mut self,
        open: &mut Open<D>,
        launch: &mut CompactLaunch<'a, '_>,
        copy: CompactCopy<'a>,
    ) -> Result<()> {
        let warps = u64::from(self.grids[Entry::Compact as usize].min(open.max_grid_blocks))
            * u64::from(BLOCK_THREADS / self.device.driver.warp_lanes());
        let slot_bytes = self.options.slot_descriptors * size_of::<CopyDescriptor>();
        let division = copy.divide(warps, self.options.tile_bytes);
        let list_bytes = size_of_val(copy.src.pages) + size_of_val(copy.dst.pages);
        if (division.units >= MOST_UNITS || list_bytes > slot_bytes)
            && let Some((one, other)) = copy.split()
        {
            // Every split halves a count, so this is never deep.
            // SAFETY: the caller's contract.
            unsafe { self.place_compact(open, launch, one) }?;
            // SAFETY: the caller's contract.
            return unsafe { self.place_compact(open, launch, other) };
        }
        let full = launch.list.len() == COMPACT_DESCRIPTORS
            || u64::from(launch.units()) + division.units >= MOST_UNITS
            || launch.list_bytes + list_bytes > slot_bytes;
        if full {
            // SAFETY: the caller's contract.
            unsafe { self.start_compact(open, launch, false) }?;
        }
        if list_bytes > 0 && launch.list_bytes == 0 {
            self.take_slot(open)?;
        }
        let lists =
            [copy.src.pages, copy.dst.pages].map(|pages| self.place_list(open, launch, pages));
        let descriptor = copy.descriptor(&division, lists, launch.units());
        launch.list.push(descriptor);
        Ok(())
    }

    /// Copies a page list into the open slot, behind those that are there, unless it is one of them;
    /// returns where the device reads it, 0 if there is none.
    fn place_list<'a>(
        &mut self,
        open: &Open<D>,
        launch: &mut CompactLaunch<'a, '_>,
        pages: &'a [u32],
    ) -> u64 {
        let Some(slot) = open.slot.filter(|_| !pages.is_empty()) else { return 0 };
        if let Some((_, address)) = launch.placed.iter().find(|it| std::ptr::eq(it.0, pages)) {
            return *address;
        }
        let used = launch.list_bytes;
        let address = self.slot_address(slot) + used as u64;
        let place = self.slot(slot).as_mut_ptr_range();
        // SAFETY: the caller found that the list fits behind `used` bytes of the slot, which is
        // ours and which no launch reads yet; `used` is a multiple of 4, and u32 is less aligned than
        // what the slot holds.
        let (narrow, place) = unsafe {
            let place = place.start.cast::<u8>().add(used);
            (std::slice::from_raw_parts_mut(place.cast(), pages.len()), place.cast::<u32>())
        };
        let (address, bytes) = if narrowed(pages, narrow) {
            (address | NARROW, size_of_val(narrow).next_multiple_of(size_of::<u32>()))
        } else {
            // SAFETY: likewise.
            unsafe { place.copy_from_nonoverlapping(pages.as_ptr(), pages.len()) };
            (address, size_of_val(pages))
        };
        launch.list_bytes += bytes;
        launch.placed.rotate_right(1);
        launch.placed[0] = (pages, address);
        address
    }

    /// Starts what was gathered, if anything was.
    ///
    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn start_compact(
        &mut self,
        open: &mut Open<D>,
        launch: &mut CompactLaunch<'_, '_>,
        is_last: bool,
    ) -> Result<()> {
        if launch.list.is_empty() {
            return Ok(());
        }
        let blocks = self.blocks(open, Entry::Compact, launch.units());
        let stream = self.use_stream(open)?;
        let end = self.end_for(open).filter(|_| is_last);
        // SAFETY: the caller's contract; the slot with the page lists stays as it is until its
        // event fires or the submission is done, because only then it becomes free. The word is this
        // submission's, and so is its count.
        unsafe { self.device.driver.launch_compact(stream, launch.list, blocks, end) }?;
        open.ends = end.is_some();
        launch.list.clear();
        if launch.list_bytes > 0 {
            launch.list_bytes = 0;
            launch.placed = Default::default();
            open.reader = Some(stream);
        }
        Ok(())
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    pub(super) unsafe fn copy(
        &mut self,
        open: &mut Open<D>,
        copies: &[CopyDescriptor],
    ) -> Result<()> {
        for &CopyDescriptor { src, dst, len } in copies {
            let stream = self.use_stream(open)?;
            // SAFETY: the caller's contract.
            unsafe { self.device.driver.copy(stream, dst, src, len) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn copy_pieces(
        &mut self,
        open: &mut Open<D>,
        pieces: &mut dyn CopySource,
    ) -> Result<()> {
        let mut few = self.take_few();
        let mut copied = Ok(());
        while copied.is_ok() {
            let count = pieces.fill(&mut few);
            if count == 0 {
                break;
            }
            // SAFETY: the caller's contract.
            copied = unsafe { self.copy(open, &few[..count]) };
        }
        self.few_list = few;
        copied
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    pub(super) unsafe fn copy_compact(
        &mut self,
        open: &mut Open<D>,
        copies: &[CompactCopy<'_>],
    ) -> Result<()> {
        for copy in copies {
            // Inside one copy only: a DMA across two allocations that touch is refused.
            let mut blocks = copy.blocks();
            let Some(mut now) = blocks.next() else { continue };
            for rows in blocks {
                if !now.join(&rows) {
                    // SAFETY: the caller's contract.
                    unsafe { self.copy_rows(open, now) }?;
                    now = rows;
                }
            }
            // SAFETY: the caller's contract.
            unsafe { self.copy_rows(open, now) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn copy_rows(&mut self, open: &mut Open<D>, rows: Rows) -> Result<()> {
        let stream = self.use_stream(open)?;
        let driver = &self.device.driver;
        // SAFETY: the caller's contract.
        if rows.count > 1 && unsafe { driver.copy_rows(stream, rows) }? {
            return Ok(());
        }
        for CopyDescriptor { src, dst, len } in rows.descriptors() {
            // SAFETY: the caller's contract.
            unsafe { driver.copy(stream, dst, src, len) }?;
        }
        Ok(())
    }
}

/// Compact descriptors that are gathered for one launch.
#[derive(Debug)]
struct CompactLaunch<'a, 'list> {
    list: &'list mut Vec<CompactDescriptor>,
    /// Bytes of page lists in the open slot.
    list_bytes: usize,
    /// The last of those lists, and where the device reads them: forms often name the same, as the
    /// keys and the values of a cache do.
    placed: [(&'a [u32], u64); 4],
}

impl<'list> CompactLaunch<'_, 'list> {
    fn new(list: &'list mut Vec<CompactDescriptor>) -> Self {
        Self { list, list_bytes: 0, placed: Default::default() }
    }

    fn units(&self) -> u32 {
        self.list.last().map_or(0, |last| last.end)
    }
}

/// Writes the numbers with 16 bits each; whether all of them have no more.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn narrowed(numbers: &[u32], place: &mut [u16]) -> bool {
    // Most lists that do not fit show it at their beginning.
    numbers.chunks(256).zip(place.chunks_mut(256)).all(|(numbers, place)| {
        let mut union = 0;
        for (place, &number) in place.iter_mut().zip(numbers) {
            *place = number as u16;
            union |= number;
        }
        union <= u16::MAX.into()
    })
}

/// One more than fit into the kernel's parameters.
pub(super) fn few_list() -> Vec<CopyDescriptor> {
    vec![CopyDescriptor::default(); INLINE_DESCRIPTORS + 1]
}

/// Fills `place` as far as the source goes.
fn fill(source: &mut dyn CopySource, place: &mut [CopyDescriptor]) -> usize {
    let mut count = 0;
    while count < place.len() {
        match source.fill(&mut place[count..]) {
            0 => break,
            more => count += more,
        }
    }
    count
}
