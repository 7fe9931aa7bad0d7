//! Host memory as a device: what a machine without a GPU uses, and what runs everywhere.
//!
//! Memory comes from memfd, so another process of this host can map it.

use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use rustix::io::fcntl_dupfd_cloexec;
use sha2::{Digest, Sha256};

use crate::compact::CompactDescriptor;
use crate::compact::Rows;
use crate::device::{Allocation, Capabilities, Device, DeviceInfo, DeviceUuid, Export, Vendor};
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Result};
use crate::gpu::GpuDevice;
use crate::kernel::{Claims, EndWord, Entry};
use crate::queue::{Consumer, CopyDescriptor, ProducerHandle};
use crate::software::{Executor, SharedMemory, map, unmap};

/// Opens host memory as a device. Copies run on a thread of the device.
///
/// # Errors
/// [`Error::NoDevice`] if that thread cannot be started.
pub fn host() -> Result<Arc<dyn Device>> {
    let executor = Executor::new("kvferry-host".into()).map_err(|error| Error::NoDevice {
        device: "host:0".into(),
        reason: format!("no thread: {error}"),
    })?;
    Ok(GpuDevice::new(HostDriver { info: info(), executor, memory: SharedMemory::default() })?)
}

#[derive(Debug)]
struct HostDriver {
    info: DeviceInfo,
    executor: Executor,
    memory: SharedMemory,
}

fn info() -> DeviceInfo {
    let memory = rustix::system::sysinfo();
    DeviceInfo {
        vendor: Vendor::Host,
        ordinal: 0,
        name: "host memory".into(),
        uuid: host_uuid(),
        pci_bus_id: None,
        architecture: String::new(),
        memory_bytes: u64::from(memory.mem_unit) * memory.totalram as u64,
        capabilities: Capabilities::KERNEL | Capabilities::IPC,
        kernel: "the processor copies".into(),
    }
}

/// The identity of host memory: one in all processes of this boot, and another one on every other
/// host. A GPU that can use page-locked memory reaches the device with this identity.
pub fn host_uuid() -> DeviceUuid {
    static HOST: OnceLock<DeviceUuid> = OnceLock::new();
    *HOST.get_or_init(|| {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digest =
            Sha256::new().chain_update(b"kvferry host memory").chain_update(boot).finalize();
        DeviceUuid(*digest.first_chunk().expect("a digest has 32 bytes"))
    })
}

/// The first byte and the length of the pages that a range touches.
pub(crate) fn whole_pages(addr: u64, len: u64) -> (u64, u64) {
    let page = rustix::param::page_size() as u64;
    let base = addr - addr % page;
    (base, (addr + len).next_multiple_of(page) - base)
}

/// Maps a `rustix` failure of the call named `call`.
pub(crate) fn system_error(
    device: &impl std::fmt::Display,
    call: &'static str,
    bytes: u64,
    error: rustix::io::Errno,
) -> Error {
    use rustix::io::Errno;
    match error {
        Errno::NOMEM => {
            return Error::OutOfMemory { device: device.to_string(), kind: "host", bytes };
        }
        Errno::MFILE | Errno::NFILE => {
            return Error::OutOfDescriptors { call, device: device.to_string() };
        }
        _ => {}
    }
    Error::Call {
        call,
        device: device.to_string(),
        name: error.to_string(),
        code: error.raw_os_error(),
    }
}

impl Driver for HostDriver {
    type Scope<'a> = ();
    type Stream = usize;
    type Event = usize;
    const LAUNCHES_STORE_WORDS: bool = false;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn reaches(&self, _other: &DeviceUuid) -> bool {
        false
    }

    fn enter(&self) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        // A GPU locks whole pages: of memory that ends inside of one the last page would be a lock by
        // itself, and every copy over its border would be cut there.
        let (_, bytes) = whole_pages(0, bytes);
        self.memory.allocate(bytes).map_err(|error| system_error(&self.info, "memfd", bytes, error))
    }

    fn free(&self, addr: u64) -> Result<()> {
        self.memory.free(addr).ok_or_else(|| self.unknown(addr))
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<Pinned> {
        let base = self.allocate(bytes)?;
        Ok(Pinned { host: base as *mut u8, device: base, len: bytes })
    }

    fn free_pinned(&self, memory: Pinned) -> Result<()> {
        self.free(memory.device)
    }

    fn allocation(&self, addr: u64) -> Result<Allocation> {
        self.memory.find(addr).ok_or_else(|| self.unknown(addr))
    }

    fn prepare_export(&self, _unit: &Allocation) -> Result<Option<Export>> {
        Ok(None)
    }

    fn export(&self, allocation: &Allocation) -> Result<Export> {
        let fd = self.memory.with_fd(allocation.base, |fd| fcntl_dupfd_cloexec(fd, 0));
        let fd = fd.ok_or_else(|| self.unknown(allocation.base))?;
        let fd = fd.map_err(|error| system_error(&self.info, "fcntl", allocation.len, error))?;
        Ok(Export::File { fd, len: allocation.len })
    }

    fn open(&self, export: Export) -> Result<u64> {
        let Export::File { fd, len } = export else {
            return Err(Error::BadExport {
                device: self.info.to_string(),
                reason: "host memory is opened by one file descriptor; this is a GPU's".into(),
            });
        };
        map(fd.as_fd(), len).map_err(|error| system_error(&self.info, "mmap", len, error))
    }

    fn close(&self, mapped: u64, len: u64) -> Result<()> {
        unmap(mapped, len);
        Ok(())
    }

    fn map_host(&self, addr: u64, _len: u64) -> Result<u64> {
        Ok(addr)
    }

    fn unmap_host(&self, _addr: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    fn create_stream(&self, _high_priority: bool) -> Result<usize> {
        Ok(self.executor.create_stream())
    }

    fn destroy_stream(&self, stream: usize) -> Result<()> {
        self.executor.destroy_stream(stream);
        Ok(())
    }

    fn create_event(&self) -> Result<usize> {
        Ok(self.executor.create_event())
    }

    fn destroy_event(&self, event: usize) -> Result<()> {
        self.executor.destroy_event(event);
        Ok(())
    }

    fn record(&self, event: usize, stream: usize) -> Result<()> {
        self.executor.record(event, stream);
        Ok(())
    }

    fn fired(&self, event: usize) -> Result<bool> {
        Ok(self.executor.fired(event))
    }

    fn wait(&self, stream: usize, event: usize) -> Result<()> {
        self.executor.wait(stream, event);
        Ok(())
    }

    unsafe fn store(&self, stream: usize, word: u64, value: u32) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.store(stream, word, value) };
        Ok(())
    }

    fn wait_producer(&self, _stream: usize, producer: ProducerHandle, _event: usize) -> Result<()> {
        let what = match producer {
            ProducerHandle::Stream(_) => "stream",
            ProducerHandle::Event(_) => "event",
        };
        Err(self.no_streams(what))
    }

    fn signal_consumer(&self, _consumer: Consumer, _event: usize) -> Result<()> {
        Err(self.no_streams("stream"))
    }

    fn warp_lanes(&self) -> u32 {
        32
    }

    fn resident_blocks(&self, _entry: Entry) -> u32 {
        u32::MAX
    }

    unsafe fn copy(&self, stream: usize, dst: u64, src: u64, len: u64) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.copy(stream, CopyDescriptor { src, dst, len }) };
        Ok(())
    }

    unsafe fn copy_rows(&self, stream: usize, rows: Rows) -> Result<bool> {
        // SAFETY: the caller's contract.
        rows.descriptors().for_each(|copy| unsafe { self.executor.copy(stream, copy) });
        Ok(true)
    }

    unsafe fn launch(
        &self,
        stream: usize,
        descriptors: u64,
        count: u32,
        _blocks: u32,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.launch(stream, descriptors, count) };
        Ok(())
    }

    unsafe fn launch_claimed(
        &self,
        stream: usize,
        descriptors: u64,
        count: u32,
        _blocks: u32,
        claims: &Claims,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.launch_claimed(stream, descriptors, count, *claims) };
        Ok(())
    }

    unsafe fn clear(&self, stream: usize, addr: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.clear(stream, addr, bytes) };
        Ok(())
    }

    unsafe fn launch_inline(
        &self,
        stream: usize,
        descriptors: &[CopyDescriptor],
        _blocks: u32,
        _end: Option<EndWord>,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.launch_inline(stream, descriptors) };
        Ok(())
    }

    unsafe fn launch_compact(
        &self,
        stream: usize,
        descriptors: &[CompactDescriptor],
        _blocks: u32,
        _end: Option<EndWord>,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.launch_compact(stream, descriptors) };
        Ok(())
    }

    unsafe fn write(&self, _stream: usize, addr: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller says that the range is writable and nobody else's now.
        unsafe { (addr as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, _stream: usize, addr: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the caller says that the range is readable and nobody writes it now.
        unsafe { (addr as *const u8).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl HostDriver {
    fn no_streams(&self, what: &'static str) -> Error {
        Error::NotOrderable {
            device: self.info.to_string(),
            what,
            reason: "host memory has no streams; submit once the work is done".into(),
        }
    }

    fn unknown(&self, addr: u64) -> Error {
        Error::UnknownAddress { device: self.info.to_string(), addr }
    }
}
