//! hipRTC, and the list of architectures, by the host's C++ compiler: the code object is a shared
//! library that runs the kernels as loops.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use hip_sys::comgr::*;
use hip_sys::hiprtc::*;

use super::device::wave_lanes;
use crate::call::Result;
use crate::settings::settings;

const PRELUDE: &str = include_str!("kernel/prelude.h");
const COPY_ENTRIES: &str = include_str!("kernel/copy_entries.h");

/// What each version of comgr knows that the one before did not; the names without features.
const ARCHITECTURES: [(c_int, &[&CStr]); 3] = [
    (
        50_000_000,
        &[
            c"amdgcn-amd-amdhsa--gfx900",
            c"amdgcn-amd-amdhsa--gfx906",
            c"amdgcn-amd-amdhsa--gfx908",
            c"amdgcn-amd-amdhsa--gfx90a",
            c"amdgcn-amd-amdhsa--gfx940",
            c"amdgcn-amd-amdhsa--gfx941",
            c"amdgcn-amd-amdhsa--gfx942",
            c"amdgcn-amd-amdhsa--gfx1030",
            c"amdgcn-amd-amdhsa--gfx1100",
        ],
    ),
    (
        60_000_000,
        &[
            c"amdgcn-amd-amdhsa--gfx950",
            c"amdgcn-amd-amdhsa--gfx1200",
            c"amdgcn-amd-amdhsa--gfx1201",
        ],
    ),
    (70_000_000, &[c"amdgcn-amd-amdhsa--gfx1250"]),
];

/// What stands before an architecture's name.
pub(super) const TARGET: &str = "amdgcn-amd-amdhsa--";

fn architectures() -> impl Iterator<Item = &'static CStr> {
    let version = settings().version;
    ARCHITECTURES
        .into_iter()
        .filter(move |(since, _)| *since <= version)
        .flat_map(|(_, names)| names.iter().copied())
}

/// A name from the list, and features that such GPUs have, each once and with its sign.
fn is_known(architecture: &str) -> bool {
    let mut parts = architecture.split(':');
    let name = parts.next().unwrap_or_default();
    let mut seen = HashSet::new();
    let features_are_known = parts.all(|part| {
        let feature = part.strip_suffix(['+', '-']).filter(|_| name.starts_with("gfx9"));
        feature.is_some_and(|it| ["sramecc", "xnack"].contains(&it) && seen.insert(it))
    });
    let target = format!("{TARGET}{name}");
    features_are_known && architectures().any(|known| known.to_bytes() == target.as_bytes())
}

pub(crate) unsafe fn amd_comgr_get_isa_count(place: *mut usize) -> Result {
    // SAFETY: the caller's contract.
    unsafe { put_or(place, architectures().count(), AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT) }
}

pub(crate) unsafe fn amd_comgr_get_isa_name(index: usize, place: *mut *const c_char) -> Result {
    let name = architectures().nth(index).ok_or(AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT)?;
    // SAFETY: the caller's contract.
    unsafe { put_or(place, name.as_ptr(), AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT) }
}

/// Succeeds where a compile would: for a name that is known, whatever its features.
pub(crate) unsafe fn amd_comgr_get_isa_metadata(
    name: *const c_char,
    place: *mut amd_comgr_metadata_node_t,
) -> Result {
    // SAFETY: the caller's contract.
    let name = unsafe { text(name) }.ok_or(AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT)?;
    let architecture = name.strip_prefix(TARGET).filter(|architecture| is_known(architecture));
    architecture.ok_or(AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT)?;
    let node = amd_comgr_metadata_node_s { handle: 1 };
    // SAFETY: the caller's contract.
    unsafe { put_or(place, node, AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT) }
}

pub(crate) unsafe fn amd_comgr_destroy_metadata(metadata: amd_comgr_metadata_node_t) -> Result {
    match metadata.handle {
        1 => Ok(()),
        _ => Err(AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT),
    }
}

/// # Safety
/// `place` is null, which gives `refused`, or writable.
unsafe fn put_or<T>(place: *mut T, value: T, refused: u32) -> Result {
    if place.is_null() {
        return Err(refused);
    }
    // SAFETY: the caller's contract.
    unsafe { place.write(value) };
    Ok(())
}

#[derive(Debug, Default)]
struct Program {
    source: String,
    file: String,
    log: String,
    code: Option<Arc<[u8]>>,
}

type Programs = HashMap<usize, Program>;

fn programs() -> MutexGuard<'static, Programs> {
    static PROGRAMS: LazyLock<Mutex<Programs>> = LazyLock::new(Mutex::default);
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) unsafe fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> Result {
    // SAFETY: the caller's contract.
    unsafe {
        put_or(major, 9, HIPRTC_ERROR_INVALID_INPUT)?;
        put_or(minor, 0, HIPRTC_ERROR_INVALID_INPUT)
    }
}

/// # Safety
/// `text` is null, which gives `None`, or ends with a zero.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's contract.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
    Some(text.to_string_lossy().into_owned())
}

pub(crate) unsafe fn hiprtcCreateProgram(
    place: *mut hiprtcProgram,
    source: *const c_char,
    name: *const c_char,
    header_count: c_int,
    _headers: *const *const c_char,
    _header_names: *const *const c_char,
) -> Result {
    // SAFETY: the caller's contract.
    let (source, name) = unsafe { (text(source), text(name)) };
    let source = source.filter(|_| header_count == 0).ok_or(HIPRTC_ERROR_INVALID_INPUT)?;
    let file = name.unwrap_or_else(|| "source".into());
    let mut programs = programs();
    let handle = (1..).find(|handle| !programs.contains_key(handle)).unwrap_or(usize::MAX);
    programs.insert(handle, Program { source, file, ..Program::default() });
    let program = std::ptr::without_provenance_mut(handle);
    // SAFETY: the caller's contract.
    unsafe { put_or(place, program, HIPRTC_ERROR_INVALID_INPUT) }
}

pub(crate) unsafe fn hiprtcDestroyProgram(program: *mut hiprtcProgram) -> Result {
    if program.is_null() {
        return Err(HIPRTC_ERROR_INVALID_INPUT);
    }
    // SAFETY: the caller's contract: it is not null, so it points to one.
    let handle = unsafe { program.replace(std::ptr::null_mut()) };
    programs().remove(&handle.addr()).map(drop).ok_or(HIPRTC_ERROR_INVALID_PROGRAM)
}

pub(crate) unsafe fn hiprtcCompileProgram(
    program: hiprtcProgram,
    option_count: c_int,
    options: *const *const c_char,
) -> Result {
    let options: Vec<String> = (0..usize::try_from(option_count).unwrap_or(0))
        // SAFETY: the caller's contract: so many texts.
        .filter_map(|index| unsafe { text(options.add(index).read()) })
        .collect();
    let mut programs = programs();
    let program = programs.get_mut(&program.addr()).ok_or(HIPRTC_ERROR_INVALID_PROGRAM)?;
    match compile(&program.source, &program.file, &options) {
        Ok((code, log)) => {
            (program.code, program.log) = (Some(code), log);
            Ok(())
        }
        Err(log) => {
            program.log = log;
            Err(HIPRTC_ERROR_COMPILATION)
        }
    }
}

/// The code and what the compiler said, or only that.
fn compile(source: &str, file: &str, options: &[String]) -> Result<(Arc<[u8]>, String), String> {
    let mut architecture =
        (!settings().devices.is_empty()).then(|| settings().architecture.clone());
    let mut passed = Vec::new();
    for option in options {
        let target = ["--gpu-architecture=", "--offload-arch="]
            .iter()
            .find_map(|prefix| option.strip_prefix(prefix));
        match target {
            Some(target) => architecture = Some(target.to_owned()),
            None if ["-D", "-U", "-std=", "--std="].iter().any(|it| option.starts_with(it)) => {
                passed.push(option.replacen("--std=", "-std=", 1));
            }
            None if ["-O", "-W", "-f", "-m", "-g"].iter().any(|it| option.starts_with(it)) => {}
            None => return Err(format!("error: unknown argument: '{option}'")),
        }
    }
    // As AMD's says it: with nothing.
    let architecture = architecture.ok_or_else(String::new)?;
    if !is_known(&architecture) {
        if settings().major() < 7 {
            eprintln!("hip-shim: {architecture} is unknown, and this version aborts then");
            std::process::abort();
        }
        return Err(String::new());
    }
    let key = (source.to_owned(), architecture.clone(), passed.clone());
    let mut known = compiled();
    if let Some(code) = known.get(&key) {
        return Ok((Arc::clone(code), String::new()));
    }
    // A folder that cannot be written says nothing, either.
    let folder = tempfile::tempdir().map_err(|_| String::new())?;
    let written = write_source(folder.path(), source, file, &architecture);
    let written = written.map_err(|_| String::new())?;
    let output = folder.path().join("code.so");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let run = Command::new(&compiler)
        .args(["-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-DKVFERRY_HOST"])
        .arg(format!("-DHIP_SHIM_LANES={}", wave_lanes()))
        .args(&passed)
        .arg(written)
        .arg("-o")
        .arg(&output)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", compiler.display()))?;
    let log = String::from_utf8_lossy(&run.stderr).into_owned();
    if !run.status.success() {
        return Err(log);
    }
    let code: Arc<[u8]> = std::fs::read(&output).map_err(|error| error.to_string())?.into();
    known.insert(key, Arc::clone(&code));
    Ok((code, log))
}

/// Source, architecture and options.
type Key = (String, String, Vec<String>);

/// What this process compiled before: tests open devices by the hundred.
fn compiled() -> MutexGuard<'static, HashMap<Key, Arc<[u8]>>> {
    static COMPILED: LazyLock<Mutex<HashMap<Key, Arc<[u8]>>>> = LazyLock::new(Mutex::default);
    COMPILED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write_source(
    folder: &Path,
    source: &str,
    file: &str,
    architecture: &str,
) -> std::io::Result<std::path::PathBuf> {
    let path = folder.join("source.cpp");
    let entries = if source.contains("kvferry_copy_host") {
        COPY_ENTRIES.to_owned()
    } else {
        kernels(source).map(|name| format!("HIP_SHIM_ENTRY({name}, {name}, run)\n")).collect()
    };
    let architecture = format!(
        "extern \"C\" const char hip_shim_architecture[];\n\
         const char hip_shim_architecture[] = \"{TARGET}{architecture}\";\n"
    );
    // So that the compiler's complaints name lines of the source.
    let text = format!(
        "{PRELUDE}\n#line 1 \"{file}\"\n{source}\n#line 1 \"entries\"\n{entries}{architecture}"
    );
    std::fs::write(&path, text)?;
    Ok(path)
}

/// Names of the kernels in a source: what stands before the parenthesis after `__global__`.
fn kernels(source: &str) -> impl Iterator<Item = &str> {
    source.split("__global__").skip(1).filter_map(|after| {
        let after = match after.split_once("__launch_bounds__") {
            Some((before, bounds)) if !before.contains('(') => bounds.split_once(')')?.1,
            _ => after,
        };
        after.split_once('(')?.0.split_whitespace().next_back()
    })
}

pub(crate) unsafe fn hiprtcGetProgramLogSize(program: hiprtcProgram, place: *mut usize) -> Result {
    let programs = programs();
    let program = programs.get(&program.addr()).ok_or(HIPRTC_ERROR_INVALID_PROGRAM)?;
    // SAFETY: the caller's contract.
    unsafe { put_or(place, program.log.len() + 1, HIPRTC_ERROR_INVALID_INPUT) }
}

pub(crate) unsafe fn hiprtcGetProgramLog(program: hiprtcProgram, place: *mut c_char) -> Result {
    let programs = programs();
    let program = programs.get(&program.addr()).ok_or(HIPRTC_ERROR_INVALID_PROGRAM)?;
    // SAFETY: the caller's contract: room for as much as `hiprtcGetProgramLogSize` said.
    unsafe {
        place.copy_from_nonoverlapping(program.log.as_ptr().cast(), program.log.len());
        place.add(program.log.len()).write(0);
    }
    Ok(())
}

pub(crate) unsafe fn hiprtcGetCodeSize(program: hiprtcProgram, place: *mut usize) -> Result {
    let len = code(program)?.len();
    // SAFETY: the caller's contract.
    unsafe { put_or(place, len, HIPRTC_ERROR_INVALID_INPUT) }
}

pub(crate) unsafe fn hiprtcGetCode(program: hiprtcProgram, place: *mut c_char) -> Result {
    let code = code(program)?;
    // SAFETY: the caller's contract: room for as much as `hiprtcGetCodeSize` said.
    unsafe { place.copy_from_nonoverlapping(code.as_ptr().cast(), code.len()) };
    Ok(())
}

fn code(program: hiprtcProgram) -> Result<Arc<[u8]>> {
    let programs = programs();
    let program = programs.get(&program.addr()).ok_or(HIPRTC_ERROR_INVALID_PROGRAM)?;
    program.code.clone().ok_or(HIPRTC_ERROR_INVALID_PROGRAM)
}

#[cfg(test)]
mod tests {
    use super::{is_known, kernels};

    #[test]
    fn an_architecture_is_known_by_its_name_and_features() {
        for known in ["gfx90a", "gfx942:sramecc+:xnack-", "gfx942:xnack+", "gfx1100", "gfx1250"] {
            assert!(is_known(known), "{known}");
        }
        for unknown in ["", "gfx999", "gfx942:", "gfx942 ", "gfx942:nonsense+", "gfx942:xnack"] {
            assert!(!is_known(unknown), "{unknown}");
        }
        for unknown in ["gfx942:xnack++", "gfx942:xnack+:xnack-", "gfx1100:xnack+", "sm_90"] {
            assert!(!is_known(unknown), "{unknown}");
        }
    }

    #[test]
    fn kernels_are_found_by_their_names() {
        let source = "extern \"C\" __global__ void spin(volatile unsigned *words) { f(1); }\n\
                      extern \"C\" __global__ void __launch_bounds__(BLOCK)\nother(int a) {}";
        assert_eq!(kernels(source).collect::<Vec<_>>(), ["spin", "other"]);
    }
}
