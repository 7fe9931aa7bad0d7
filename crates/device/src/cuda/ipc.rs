//! Device memory for another process: the driver's 64-byte handle behind a tag of this process.
//!
//! The tag is no secret and proves nothing; it only spares a process the attempt to open its own
//! export, which the driver refuses with a misleading error (FAILURES.md B05).

use std::ffi::{c_char, c_void};
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::CudaDriver;
use crate::device::{Allocation, Export};
use crate::error::{Error, Result};

const TAG_BYTES: usize = 16;
const HANDLE_BYTES: usize = size_of::<sys::CUipcMemHandle>();

const _: () = assert!(HANDLE_BYTES == 64, "an export is 16 bytes of tag and 64 of handle");

/// Random, one for the life of the process.
fn process_tag() -> [u8; TAG_BYTES] {
    static TAG: OnceLock<[u8; TAG_BYTES]> = OnceLock::new();
    *TAG.get_or_init(|| {
        let random = RandomState::new();
        let halves = [random.hash_one(0_u8), random.hash_one(1_u8)].map(u64::to_le_bytes);
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(halves.as_flattened());
        tag
    })
}

/// The driver's handle in an export, or why it must not be opened.
fn parse(bytes: &[u8], device: &str) -> Result<sys::CUipcMemHandle> {
    let bad = || Error::BadExport {
        device: device.into(),
        reason: format!(
            "a CUDA handle has {} bytes, this one has {}",
            TAG_BYTES + HANDLE_BYTES,
            bytes.len()
        ),
    };
    let (tag, handle) = bytes.split_first_chunk::<TAG_BYTES>().ok_or_else(bad)?;
    let handle = <&[u8; HANDLE_BYTES]>::try_from(handle).map_err(|_| bad())?;
    if *tag == process_tag() {
        return Err(Error::SameProcess { device: device.into() });
    }
    Ok(sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) })
}

impl CudaDriver {
    pub(super) fn export_handle(&self, allocation: &Allocation) -> Result<Export> {
        let capable = self.attributes(allocation.base)?.is_some_and(|found| found.legacy_ipc != 0);
        if !capable {
            return Err(self.not_exportable(allocation));
        }
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the driver writes one handle and refuses an address that it does not know.
        match unsafe { self.cuda().cuIpcGetMemHandle(&mut handle, allocation.base) } {
            Ok(()) => {}
            Err(failure)
                if failure.is(sys::CUresult::CUDA_ERROR_INVALID_VALUE)
                    || failure.is(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED) =>
            {
                return Err(self.not_exportable(allocation));
            }
            Err(failure) => return Err(self.error(failure)),
        }
        let mut bytes = Vec::with_capacity(TAG_BYTES + HANDLE_BYTES);
        bytes.extend(process_tag());
        bytes.extend(handle.reserved.map(|byte| byte as u8));
        Ok(Export::Handle { bytes, len: allocation.len })
    }

    fn not_exportable(&self, allocation: &Allocation) -> Error {
        let reason = if self.is_virtual(allocation.base) {
            "it is memory of the virtual memory API, as PyTorch's expandable segments are: set \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or allocate with cudaMalloc"
        } else {
            "the driver gives no handle for it: it is memory of a stream-ordered pool, managed, or \
             mapped from another process; allocate with cudaMalloc"
        };
        Error::NotExportable {
            device: self.info.to_string(),
            base: allocation.base,
            reason: reason.into(),
        }
    }

    /// Whether the virtual memory API made it; pools and cudaMalloc are refused (LAB.md).
    fn is_virtual(&self, addr: u64) -> bool {
        let mut handle = 0;
        // SAFETY: the driver writes one handle and refuses an address that has none.
        if unsafe { self.cuda().cuMemRetainAllocationHandle(&mut handle, addr as *mut c_void) }
            .is_err()
        {
            return false;
        }
        // SAFETY: gives back the one reference that was just taken.
        let _ = unsafe { self.cuda().cuMemRelease(handle) };
        true
    }

    pub(super) fn open_handle(&self, export: Export) -> Result<u64> {
        let device = || self.info.to_string();
        let Export::Handle { bytes, len } = export else {
            let reason = "CUDA memory is opened by a handle, not by a file descriptor".into();
            return Err(Error::BadExport { device: device(), reason });
        };
        let handle = parse(&bytes, &device())?;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut addr = 0;
        // SAFETY: the driver checks the handle; it maps at an address of its own choice.
        unsafe { self.cuda().cuIpcOpenMemHandle_v2(&mut addr, handle, flags) }.map_err(|failure| {
            use sys::CUresult::*;
            if failure.is(CUDA_ERROR_ALREADY_MAPPED) {
                return Error::AlreadyMapped { device: device(), bytes: len };
            }
            let of_the_handle = [
                CUDA_ERROR_INVALID_VALUE,
                CUDA_ERROR_INVALID_HANDLE,
                CUDA_ERROR_INVALID_CONTEXT,
                CUDA_ERROR_INVALID_DEVICE,
                CUDA_ERROR_MAP_FAILED,
                CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
                CUDA_ERROR_TOO_MANY_PEERS,
            ];
            if of_the_handle.into_iter().any(|code| failure.is(code)) {
                let reason = format!(
                    "{}; the memory was freed, its process has ended, another library of this process exported \
                     it, or this process cannot see its GPU",
                    self.cuda().describe(failure)
                );
                return Error::BadExport { device: device(), reason };
            }
            self.error(failure)
        })?;
        if let Err(reason) = self.check_mapping(addr, len) {
            // SAFETY: opened above, closed once.
            let _ = unsafe { self.cuda().cuIpcCloseMemHandle(addr) };
            return Err(Error::BadExport { device: device(), reason });
        }
        Ok(addr)
    }

    /// Whether the length that came with the handle is true: it may be a lie of the exporter.
    fn check_mapping(&self, addr: u64, len: u64) -> Result<(), String> {
        let Ok(Some(found)) = self.attributes(addr) else {
            return Err(format!("the driver does not know {addr:#x}, where it mapped the memory"));
        };
        let end = found.start.saturating_add(found.len as u64);
        match addr.checked_add(len) {
            Some(last) if addr >= found.start && last <= end => Ok(()),
            _ => Err(format!(
                "{len} bytes were announced, {} bytes were mapped",
                end.saturating_sub(addr)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_of_this_process_is_recognised_before_the_driver_is_asked() {
        let mut bytes = process_tag().to_vec();
        bytes.resize(TAG_BYTES + HANDLE_BYTES, 7);
        assert_eq!(
            parse(&bytes, "cuda:0").err(),
            Some(Error::SameProcess { device: "cuda:0".into() })
        );
        bytes[0] ^= 1;
        let handle = parse(&bytes, "cuda:0").expect("a foreign tag");
        assert_eq!(handle.reserved, [7; HANDLE_BYTES]);
    }

    #[test]
    fn handles_of_other_lengths_are_refused() {
        for len in (0..200).filter(|&len| len != TAG_BYTES + HANDLE_BYTES) {
            let mut bytes = process_tag().to_vec();
            bytes.resize(len, 0);
            assert!(matches!(parse(&bytes, "cuda:0"), Err(Error::BadExport { .. })), "{len} bytes");
        }
    }
}
