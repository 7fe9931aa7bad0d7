//! Files that a program finds in the place of AMD's: copies of the built library, each with a SONAME
//! and without the functions that its namesake does not have.

use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::exports::{comgr, hip, hiprtc};

/// The built library's name.
pub const BUILT: &str = "libhip_shim.so";

/// The version that is meant if none is asked for, as `hipRuntimeGetVersion` gives it: 7.2.
pub const VERSION: u32 = 70_253_211;

/// What `build.rs` had the linker write.
const SONAME: &[u8] = b"kvferry_hip_shim_without_soname.so";

/// Functions that came with a version.
const SINCE: [(u32, &str); 3] = [
    (60_000_000, "hipGetDevicePropertiesR0600"),
    (70_000_000, "hipMemGetHandleForAddressRange"),
    (70_100_000, "hipMemcpyBatchAsync"),
];

/// Writes the libraries of a ROCm of that version to a folder, for LD_LIBRARY_PATH. They lack what
/// that version lacks, and the functions in `absent`.
///
/// `KVFERRY_HIP_SHIM_VERSION` must say the same to the process that loads them.
///
/// # Errors
/// If [`BUILT`] is not beside this program, where cargo puts it; if one in `absent` is no function
/// that it exports; or as files fail.
pub fn install(folder: &Path, version: u32, absent: &[&str]) -> Result<()> {
    let built = std::fs::read(find_built()?)?;
    let all = || [hip::NAMES, hiprtc::NAMES, comgr::NAMES].into_iter().flatten().copied();
    if let Some(unknown) = absent.iter().find(|name| !all().any(|known| known == **name)) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("no function {unknown}")));
    }
    let too_new = SINCE.iter().filter(|(since, _)| version < *since).map(|(_, name)| *name);
    let absent: Vec<&str> = absent.iter().copied().chain(too_new).collect();
    for (name, functions) in libraries(version / 10_000_000) {
        let mut library = built.clone();
        let strings = dynamic_strings(&library).ok_or_else(|| malformed("no dynamic symbols"))?;
        let strings = &mut library[strings];
        rename(strings, SONAME, name.as_bytes())?;
        let has = |function: &str| functions.iter().any(|list| list.contains(&function));
        for function in all().filter(|function| !has(function) || absent.contains(function)) {
            let other = function.replacen(['h', 'a'], "_", 1);
            rename(strings, function.as_bytes(), other.as_bytes())?;
        }
        std::fs::write(folder.join(name), library)?;
    }
    Ok(())
}

/// Files of a major version, and what is in each.
fn libraries(major: u32) -> Vec<(String, Vec<&'static [&'static str]>)> {
    let hip_too = if major < 7 { vec![hip::NAMES, hiprtc::NAMES] } else { vec![hip::NAMES] };
    let mut libraries = vec![(format!("libamdhip64.so.{major}"), hip_too)];
    if major >= 6 {
        libraries.push((format!("libhiprtc.so.{major}"), vec![hiprtc::NAMES]));
    }
    let comgr_major = if major < 6 { 2 } else { 3 };
    libraries.push((format!("libamd_comgr.so.{comgr_major}"), vec![comgr::NAMES]));
    libraries
}

/// Beside this program or above it: a test is in a folder of its own.
fn find_built() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folders = program.ancestors().skip(1).take(2);
    let places = folders.flat_map(|folder| [folder.join("deps").join(BUILT), folder.join(BUILT)]);
    places.into_iter().find(|place| place.exists()).ok_or_else(|| {
        let text = format!("{BUILT} is not beside {}", program.display());
        Error::new(ErrorKind::NotFound, text)
    })
}

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("{BUILT}: {what}"))
}

/// Writes a name over another one, which is at least as long.
fn rename(strings: &mut [u8], old: &[u8], new: &[u8]) -> Result<()> {
    let whole = [b"\0", old, b"\0"].concat();
    let at = strings.windows(whole.len()).position(|window| window == whole);
    let missing = || malformed(&format!("no {}", String::from_utf8_lossy(old)));
    let at = at.ok_or_else(missing)? + 1;
    strings[at..at + old.len()].fill(0);
    strings[at..at + new.len()].copy_from_slice(new);
    Ok(())
}

/// Where in a 64-bit ELF file the names of its dynamic symbols are.
fn dynamic_strings(file: &[u8]) -> Option<Range<usize>> {
    /// Type of the section with the symbols.
    const DYNAMIC_SYMBOLS: u64 = 11;
    let number = |at: usize, bytes: usize| {
        let found = file.get(at..at + bytes)?;
        Some(found.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
    };
    let sections = number(0x28, 8)? as usize;
    let (entry, count) = (number(0x3a, 2)? as usize, number(0x3c, 2)? as usize);
    let section = |index: usize| sections + index * entry;
    let symbols =
        (0..count).find(|&index| number(section(index) + 4, 4) == Some(DYNAMIC_SYMBOLS))?;
    // The section says which one has its names.
    let strings = section(number(section(symbols) + 0x28, 4)? as usize);
    let start = number(strings + 0x18, 8)? as usize;
    let end = start.checked_add(number(strings + 0x20, 8)? as usize)?;
    (end <= file.len()).then_some(start..end)
}
