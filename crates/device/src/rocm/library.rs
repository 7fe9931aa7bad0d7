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
use super::search::{Found, Search, said};
use crate::error::{Error, Result};

/// Major versions of the SONAME. ROCm 10 still has 7.
const MAJORS: [u32; 3] = [7, 6, 5];

/// The oldest version whose headers agree with the bindings (ci/bindings.sh): 5.2 has the fields of
/// `hipMemAllocationProp` in another order.
const OLDEST: (u32, u32) = (5, 7);

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
    let [newest, ..] = MAJORS;
    let (oldest, minor) = OLDEST;
    if (version.major, version.minor) < OLDEST {
        return Err(format!(
            "it is HIP {version}; kvferry works with HIP {oldest}.{minor} and later"
        ));
    }
    match named {
        Some(named) if named == version.major.min(newest) => Ok(named),
        Some(named) => Err(format!(
            "it is HIP {version} under the name of HIP {named}: ROCm is installed twice, or a link is wrong"
        )),
        None if version.major <= newest => Ok(version.major),
        None => Err(format!(
            "it is HIP {version}, with a SONAME that kvferry does not know; kvferry works with HIP {oldest} \
             to {newest}"
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
                    .map_err(|error| missing(format!("{reason}; {}", said(&error))))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::skip;
    use crate::rocm::fake::build;
    use crate::rocm::functions::NO_SYMBOL;
    use crate::rocm::identity;

    fn functions(names: &[&str]) -> String {
        names.iter().map(|name| format!("int {name}() {{ return 0; }}\n")).collect()
    }

    /// Everything that a device needs, but `without`, and the given version.
    fn hip_source(version: u32, without: &str) -> String {
        let other = |name: &&str| ![without, "hipRuntimeGetVersion"].contains(name);
        let names: Vec<_> = Hip::REQUIRED.iter().copied().filter(other).collect();
        let version = format!("int hipRuntimeGetVersion(int* v) {{ *v = {version}; return 0; }}\n");
        functions(&names) + &version
    }

    fn open(name: &str, directory: &Path) -> Result<Hip> {
        let directories = [directory.to_owned()];
        let directories = &directories;
        Hip::open(&Search { name, majors: &MAJORS, others: true, beside: None, directories })
    }

    #[test]
    fn a_library_of_another_version_than_its_name_says_is_refused() {
        let directory = tempfile::tempdir().expect("a folder");
        for (name, soname, version, expected) in [
            (
                "libkvferry_a.so",
                ".4",
                40_421_401,
                Err("it is HIP 4.4.21401; kvferry works with HIP 5.7 and later"),
            ),
            (
                "libkvferry_b.so",
                ".6",
                70_253_211,
                Err("it is HIP 7.2.53211 under the name of HIP 6"),
            ),
            (
                "libkvferry_c.so",
                ".7",
                60_443_484,
                Err("it is HIP 6.4.43484 under the name of HIP 7"),
            ),
            ("libkvferry_d.so", ".8", 80_000_000, Err("with a SONAME that kvferry does not know")),
            (
                "libkvferry_j.so",
                ".5",
                50_221_153,
                Err("it is HIP 5.2.21153; kvferry works with HIP 5.7"),
            ),
            ("libkvferry_e.so", ".5", 50_731_921, Ok(5)),
            ("libkvferry_f.so", ".6", 60_443_484, Ok(6)),
            ("libkvferry_g.so", ".7", 70_253_211, Ok(7)),
            // ROCm 10 still has the SONAME of 7.
            ("libkvferry_h.so", ".7", 100_100_000, Ok(7)),
            // No SONAME with a version at all.
            ("libkvferry_i.so", "", 60_443_484, Ok(6)),
        ] {
            let source = hip_source(version, "");
            let soname = format!("{name}{soname}");
            let Some(()) = build(directory.path(), name, &soname, &source) else { return };
            match (open(name, directory.path()), expected) {
                (Ok(hip), Ok(major)) => {
                    assert_eq!(hip.major, major, "{name}");
                    assert_eq!(hip.path, directory.path().join(name).canonicalize().unwrap());
                }
                (Err(error @ Error::LibraryMissing { .. }), Err(reason)) => {
                    assert!(error.to_string().contains(reason), "{name}: {error}");
                    assert!(error.to_string().contains(name), "{name}: {error}");
                }
                (opened, expected) => panic!("{name}: {opened:?} and not {expected:?}"),
            }
        }
    }

    #[test]
    fn a_library_without_a_function_that_is_needed_says_which() {
        let directory = tempfile::tempdir().expect("a folder");
        for (index, &symbol) in Hip::REQUIRED.iter().enumerate().step_by(10) {
            let name = format!("libkvferry_without_{index}.so");
            let source = hip_source(70_253_211, symbol);
            let Some(()) = build(directory.path(), &name, &name, &source) else { return };
            let expected = Error::SymbolMissing { library: Hip::LIBRARY, symbol };
            assert_eq!(open(&name, directory.path()).err(), Some(expected));
        }
    }

    #[test]
    fn a_function_that_is_optional_fails_by_itself_where_it_is_missing() {
        let directory = tempfile::tempdir().expect("a folder");
        let name = "libkvferry_optional.so";
        let source = hip_source(70_253_211, "");
        let Some(()) = build(directory.path(), name, name, &source) else { return };
        let hip = open(name, directory.path()).expect("all that is needed");
        // SAFETY: the library does not have it.
        let failure = unsafe { hip.hipMemUnmap(std::ptr::null_mut(), 0) }.expect_err("missing");
        assert_eq!(failure, Failure { call: "hipMemUnmap", code: NO_SYMBOL });
        assert!(hip.symbols().contains(&("hipMemUnmap", false)));
        assert!(hip.symbols().contains(&("hipInit", true)));
    }

    #[test]
    fn hiprtc_is_of_the_same_major_version_or_inside_hip() {
        let directory = tempfile::tempdir().expect("a folder");
        let compiler = functions(Hiprtc::REQUIRED);
        for (name, version, inside, beside, expected) in [
            ("libkvferry_0.so", 70_253_211, false, Some(".7"), Ok("libkvferry_0.so.rtc")),
            (
                "libkvferry_1.so",
                70_253_211,
                false,
                Some(".6"),
                Err("its SONAME is not libkvferry_1.so.rtc.7"),
            ),
            ("libkvferry_2.so", 70_253_211, true, None, Err("libkvferry_2.so.rtc.7: ")),
            ("libkvferry_3.so", 60_443_484, true, Some(".6"), Ok("libkvferry_3.so.rtc")),
            ("libkvferry_4.so", 60_443_484, true, Some(".7"), Ok("libkvferry_4.so")),
            ("libkvferry_5.so", 50_731_921, true, None, Ok("libkvferry_5.so")),
        ] {
            let source = hip_source(version, "") + if inside { &compiler } else { "" };
            let Some(()) = build(directory.path(), name, name, &source) else { return };
            let rtc = format!("{name}.rtc");
            if let Some(soname) = beside {
                let soname = format!("{rtc}{soname}");
                let Some(()) = build(directory.path(), &rtc, &soname, &compiler) else { return };
            }
            let hip = open(name, directory.path()).expect("HIP");
            match (Hiprtc::open(&hip, &rtc, &[]), expected) {
                (Ok(hiprtc), Ok(file)) => {
                    assert_eq!(hiprtc.path.file_name().unwrap(), file, "{name}");
                }
                (Err(error @ Error::LibraryMissing { .. }), Err(reason)) => {
                    assert!(error.to_string().contains(reason), "{name}: {error}");
                }
                (opened, expected) => panic!("{name}: {opened:?} and not {expected:?}"),
            }
        }
    }

    #[test]
    fn numbers_mean_what_the_version_says() {
        let version = |major| Version { major, minor: 0, patch: 0 };
        use MemoryType::{Device, Host, Managed, Other};
        for (major, expected) in [
            (5, [Host, Device, Other, Other, Managed, Other]),
            (6, [Other, Host, Device, Managed, Other, Other]),
            (7, [Other, Host, Device, Managed, Other, Other]),
        ] {
            for (number, expected) in (0..).zip(expected) {
                assert_eq!(MemoryType::new(version(major), number), expected, "{major}: {number}");
            }
        }
    }

    #[test]
    fn codes_after_which_nothing_works_are_lost_and_others_are_not() {
        for code in [4, 214, 700, 702, 709, 710, 719] {
            assert!(is_lost(code), "{code}");
        }
        for code in [0, 1, 2, 17, 100, 101, 201, 400, 500, 600, 704, 705, 801, 999, 123_456] {
            assert!(!is_lost(code), "{code}");
        }
    }

    /// Also with the real libraries, of which several versions are at hand (ci/rocm-roots.sh).
    #[test]
    fn a_hip_without_a_gpu_says_why_there_is_no_device() {
        let hip = match Hip::load(&[]) {
            Ok(hip) => hip,
            Err(error) => return skip("hip", &error),
        };
        assert_eq!(hip.major, hip.version.major.min(7));
        assert_eq!(hip.ipc_open_flags(), u32::from(hip.version.major > 5));
        match identity::count(hip, "rocm") {
            Ok(count) => skip("no-gpu", &format!("HIP sees {count}")),
            Err(Error::NoDevice { device, reason }) => {
                assert_eq!(device, "rocm");
                assert!(reason.contains("(100)") || reason.contains("(101)"), "{reason}");
                assert!(
                    reason.contains("/dev/kfd") || reason.contains("VISIBLE_DEVICES"),
                    "{reason}"
                );
            }
            Err(error) => panic!("{error}"),
        }
    }
}
