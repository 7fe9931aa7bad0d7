//! libamdhip64, libhiprtc and libamd_comgr, found at run time, and what their version decides.
//!
//! All three must be of one ROCm: hipRTC of the major version of HIP, and comgr from where hipRTC
//! takes it. A library that was loaded stays loaded for the life of the process.

use std::ffi::{c_int, c_uint};
use std::fmt::{self, Debug, Display};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use hip_sys as sys;
use hip_sys::{comgr, hiprtc};
use libloading::os::unix::Library;

use super::functions::Failure;
use super::search::{Found, Search};
use crate::error::{Error, Result};

/// Major versions of the SONAME. ROCm 10 still has 7.
const MAJORS: [u32; 3] = [7, 6, 5];

/// Major versions of comgr's SONAME, which counts for itself: 2 up to ROCm 6.3, 3 since.
const COMGR_MAJORS: [u32; 2] = [3, 2];

/// The folder of libraries of a ROCm that AMD's packages installed.
pub const DEFAULT_LIBRARY_DIRECTORY: &str = "/opt/rocm/lib";

/// A version of HIP: 6.4.43484.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) patch: u32,
}

impl Version {
    /// From `hipRuntimeGetVersion`.
    fn new(number: c_int) -> Self {
        let number = u32::try_from(number).unwrap_or(0);
        Self { major: number / 10_000_000, minor: number / 100_000 % 100, patch: number % 100_000 }
    }
}

impl Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// libamdhip64.
pub(super) struct Hip {
    pub(super) functions: sys::HipLibrary,
    pub(super) version: Version,
    /// Of the SONAME, which other libraries of the same ROCm share.
    major: u32,
    pub(super) path: PathBuf,
}

/// libhiprtc, or that part of libamdhip64 up to HIP 6.
pub(super) struct Hiprtc {
    pub(super) functions: hiprtc::HiprtcLibrary,
    pub(super) path: PathBuf,
}

/// libamd_comgr, which knows the architectures that hipRTC compiles for.
pub(super) struct Comgr {
    pub(super) functions: comgr::ComgrLibrary,
    pub(super) path: PathBuf,
}

impl Hip {
    pub(super) const LIBRARY: &'static str = "libamdhip64.so";

    /// The library that this process uses, found by the first call; `directories` are looked into
    /// after all places that the loader knows.
    pub(super) fn load(directories: &[PathBuf]) -> Result<&'static Self> {
        static LOADED: OnceLock<Hip> = OnceLock::new();
        if let Some(hip) = LOADED.get() {
            return Ok(hip);
        }
        let search = Search {
            name: Self::LIBRARY,
            majors: &MAJORS,
            others: true,
            beside: None,
            directories,
        };
        let hip = Self::open(&search)?;
        Ok(LOADED.get_or_init(|| hip))
    }

    fn open(search: &Search<'_>) -> Result<Self> {
        let missing = |reason| Error::LibraryMissing { library: Self::LIBRARY, reason };
        let Found { library, name, major } = search.open().map_err(missing)?;
        let (functions, path) = Self::fill(library, name)?;
        let mut hip = Self { functions, version: Version::new(0), major: 0, path };
        let mut number = 0;
        // SAFETY: HIP writes one number, and does not have to be initialised for it.
        let asked = unsafe { hip.hipRuntimeGetVersion(&mut number) };
        hip.version = Version::new(number);
        let checked = match asked {
            Ok(()) => major_of(hip.version, major),
            Err(failure) => Err(hip.describe(failure)),
        };
        match checked {
            Ok(major) => Ok(Self { major, ..hip }),
            Err(reason) => {
                let reason = format!("{}: {reason}", hip.path.display());
                // As in `fill`.
                std::mem::forget(hip);
                Err(missing(reason))
            }
        }
    }

    /// A failure in words, for errors that have no place for a number.
    pub(super) fn describe(&self, failure: Failure) -> String {
        format!("{} failed: {} ({})", failure.call, self.name(failure.code), failure.code)
    }

    /// What a failed call means for `device`.
    pub(super) fn error(&self, failure: Failure, device: impl Display) -> Error {
        let device = device.to_string();
        if is_lost(failure.code) {
            return Error::Lost { device, cause: self.describe(failure) };
        }
        Error::Call {
            call: failure.call,
            device,
            name: self.name(failure.code),
            code: i32::try_from(failure.code).unwrap_or(i32::MAX),
        }
    }

    /// Flags with which a handle of another process is opened: HIP refuses all but one value.
    pub(super) fn ipc_open_flags(&self) -> c_uint {
        match self.version.major {
            ..=5 => sys::IPC_MEM_LAZY_ENABLE_PEER_ACCESS_HIP5,
            _ => sys::hipIpcMemLazyEnablePeerAccess,
        }
    }

    /// What a number of `hipPointerGetAttributes` means.
    pub(super) fn memory_type(&self, number: sys::hipMemoryType) -> MemoryType {
        MemoryType::new(self.version, number)
    }
}

/// Whose memory an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryType {
    /// Page-locked.
    Host,
    Device,
    Managed,
    /// Nobody's that HIP knows of, or of a kind that is no memory for us.
    Other,
}

impl MemoryType {
    fn new(version: Version, number: sys::hipMemoryType) -> Self {
        use sys::memory_type_hip5::{DEVICE, HOST, MANAGED};
        let hip5 = version.major <= 5;
        match number {
            HOST if hip5 => Self::Host,
            DEVICE if hip5 => Self::Device,
            MANAGED if hip5 => Self::Managed,
            _ if hip5 => Self::Other,
            sys::hipMemoryTypeHost => Self::Host,
            sys::hipMemoryTypeDevice => Self::Device,
            sys::hipMemoryTypeManaged => Self::Managed,
            _ => Self::Other,
        }
    }
}

/// The major version of the SONAME of a HIP of this version that was opened under a name of major
/// version `named`; where the two do not fit, why.
fn major_of(version: Version, named: Option<u32>) -> Result<u32, String> {
    let [newest, .., oldest] = MAJORS;
    if version.major < oldest {
        return Err(format!("it is HIP {version}; kvferry works with HIP {oldest} to {newest}"));
    }
    match named {
        Some(named) if named == version.major.min(newest) => Ok(named),
        Some(named) => Err(format!(
            "it is HIP {version} under the name of HIP {named}: ROCm is installed twice, or a link is wrong"
        )),
        None if version.major <= newest => Ok(version.major),
        None => Err(format!(
            "it is HIP {version}, with a SONAME that kvferry does not know; kvferry works with HIP {oldest} to {newest}"
        )),
    }
}

impl Hiprtc {
    pub(super) const LIBRARY: &'static str = "libhiprtc.so";

    /// The compiler that belongs to `hip`, which is the one that [`Hip::load`] gave.
    pub(super) fn load(hip: &'static Hip, directories: &[PathBuf]) -> Result<&'static Self> {
        static LOADED: OnceLock<Hiprtc> = OnceLock::new();
        if let Some(hiprtc) = LOADED.get() {
            return Ok(hiprtc);
        }
        let hiprtc = Self::open(hip, Self::LIBRARY, directories)?;
        Ok(LOADED.get_or_init(|| hiprtc))
    }

    fn open(hip: &Hip, name: &str, directories: &[PathBuf]) -> Result<Self> {
        let beside = hip.path.parent().filter(|directory| directory.is_absolute());
        let search = Search { name, majors: &[hip.major], others: false, beside, directories };
        let missing = |reason| Error::LibraryMissing { library: Self::LIBRARY, reason };
        let (library, name) = match search.open() {
            Ok(found) => (found.library, found.name),
            // Until HIP 6 it is also a part of HIP, and of Debian's HIP 5 it is nothing else.
            Err(reason) if hip.major <= 6 => {
                // SAFETY: HIP itself, which is loaded.
                let library = unsafe { Library::new(&hip.path) }
                    .map_err(|error| missing(format!("{reason}; {error}")))?;
                (library, hip.path.clone())
            }
            Err(reason) => return Err(missing(reason)),
        };
        let (functions, path) = Self::fill(library, name)?;
        Ok(Self { functions, path })
    }
}

impl Comgr {
    pub(super) const LIBRARY: &'static str = "libamd_comgr.so";

    /// The one that `hiprtc` uses, or will use: it may load it at its first compile only.
    pub(super) fn load(hiprtc: &'static Hiprtc, directories: &[PathBuf]) -> Result<&'static Self> {
        static LOADED: OnceLock<Comgr> = OnceLock::new();
        if let Some(comgr) = LOADED.get() {
            return Ok(comgr);
        }
        let comgr = Self::open(hiprtc.path.parent(), directories)?;
        Ok(LOADED.get_or_init(|| comgr))
    }

    fn open(beside: Option<&Path>, directories: &[PathBuf]) -> Result<Self> {
        let beside = beside.filter(|directory| directory.is_absolute());
        let name = Self::LIBRARY;
        let search = Search { name, majors: &COMGR_MAJORS, others: false, beside, directories };
        let missing = |reason| Error::LibraryMissing { library: Self::LIBRARY, reason };
        let Found { library, name, .. } = search.open().map_err(missing)?;
        let (functions, path) = Self::fill(library, name)?;
        Ok(Self { functions, path })
    }
}

/// Codes after which the device does not work any more in this process.
fn is_lost(code: c_uint) -> bool {
    [
        sys::hipErrorDeinitialized,
        sys::hipErrorECCNotCorrectable,
        sys::hipErrorIllegalAddress,
        sys::hipErrorLaunchTimeOut,
        sys::hipErrorContextIsDestroyed,
        sys::hipErrorAssert,
        sys::hipErrorLaunchFailure,
    ]
    .contains(&code)
}

impl Debug for Hip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HIP {} of {}", self.version, self.path.display())
    }
}

impl Debug for Hiprtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hipRTC of {}", self.path.display())
    }
}

impl Debug for Comgr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "comgr of {}", self.path.display())
    }
}
